"""The kernels compute the same bits on other processors: built for them with a cross-compiler, run in an emulator.

``kernels_check.cpp`` holds every kernel against plain sums in double precision, for all instruction sets, one and two
threads and several numbers of rows, and prints a digest of what came out.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cospec.native import library

ROOT = Path(__file__).resolve().parents[3]
CHECK = Path(__file__).with_name("kernels_check.cpp")
if not (ROOT / "csrc").exists():
    pytest.skip("the kernels' sources are not here", allow_module_level=True)


def builder() -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(folder: Path, compiler: str, emulator: tuple[str, ...] = (), isas: tuple[str, ...] | None = None) -> str:
    """Build the library as an installation does, or for ``isas`` only, and the program that checks it; run that."""
    for tool in (compiler, *emulator[:1]):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", compiler)
        (folder / "src" / "cospec").mkdir(parents=True)
        (folder / "csrc").symlink_to(ROOT / "csrc")
        build = builder()
        if isas is not None:
            patch.setattr(build, "ISAS", {isa: build.ISAS[isa] for isa in isas})
        built = build.build(folder)
    return run_check(folder, compiler, built, emulator)


def run_check(folder: Path, compiler: str, built: Path, emulator: tuple[str, ...] = ()) -> str:
    """Build the program that checks a library, and run the program; returns the digest."""
    program = folder / "check"
    flags = ["-std=c++17", "-O1", "-w", f"-I{ROOT / 'csrc'}", f"-Wl,-rpath,{built.parent}"]
    subprocess.run([compiler, *flags, str(CHECK), str(built), "-o", str(program)], check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the installed library, or of a new one if a source is younger or no library is installed."""
    folder, installed = tmp_path_factory.mktemp("here"), ROOT / "src" / "cospec" / "_native.so"
    sources = [ROOT / "hatch_build.py", *(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]
    built = installed.stat().st_mtime if installed.exists() else 0.0
    if built > max(path.stat().st_mtime for path in sources) and shutil.which("g++") is not None:
        return run_check(folder, "g++", installed)
    return digest(folder, "g++")


@pytest.mark.slow
def test_this_machine_computes_what_the_kernels_promise(here: str) -> None:
    assert len(here.strip()) == 16


@pytest.mark.slow
def test_arm_processors_compute_the_same_bits(here: str, tmp_path: Path) -> None:
    emulator = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
    assert digest(tmp_path, "aarch64-linux-gnu-g++", emulator) == here


def emulated_digest(folder: Path, isa: str, needs: str, script: str, header: str) -> str:
    """The digest of the code for ``isa``, which runs on a processor that offers ``needs``.

    Args:
        script: the compiler; ``{header}`` and ``{emulation}`` are the paths of the header and of the emulated tiles.
        header: what the library asks the processor, with other answers.
    """
    if needs not in library.offered() or shutil.which("g++") is None:
        pytest.skip(f"needs g++ and a processor with {needs}")
    included, compiler = folder / "included.h", folder / "compiler"
    included.write_text(header)
    compiler.write_text(script.format(header=included, emulation=CHECK.with_name("amx_emulation.h")))
    compiler.chmod(0o755)
    return digest(folder, str(compiler), isas=(isa,))


# VEX and EVEX encode the same dot product; the assembler of the file of this instruction set writes the other one.
# The other files are under test in ``here``, so that their optimisation needs less time.
EVEX_COMPILER = """#!/bin/sh
case "$*" in
*COSPEC_ISA=avx_vnni*)
    for output; do :; done
    g++ -include {header} "$@" -S && grep -q '{{vex}} vpdpbusd' "$output" &&
    sed 's/{{vex}} vpdpbusd/{{evex}} vpdpbusd/' "$output" > "$output.s" && exec g++ -c "$output.s" -o "$output";;
*) exec g++ -include {header} "$@" -O0;;
esac
"""
CPUID = """#include <cpuid.h>
#undef __get_cpuid_count
#define __get_cpuid_count(leaf, subleaf, eax, ebx, ecx, edx) (*(eax) = 1 << 4, 1)
"""


@pytest.mark.slow
def test_avx_vnni_computes_the_same_bits(here: str, tmp_path: Path) -> None:
    """The code for AVX-VNNI runs on a processor with AVX-512, whose encoding of the dot product it gets."""
    assert emulated_digest(tmp_path, "avx_vnni", "avx512_vnni", EVEX_COMPILER, CPUID) == here


AMX_COMPILER = """#!/bin/sh
case "$*" in
*COSPEC_ISA=amx_bf16*)
    for word; do
        shift
        case "$word" in -mamx*) ;; *) set -- "$@" "$word";; esac
    done
    exec g++ -include {emulation} "$@" -Og;;
*) exec g++ -include {header} "$@" -O0;;
esac
"""
AMX_DETECTION = """#include <cpuid.h>
#include <unistd.h>
#undef __get_cpuid_count
#define __get_cpuid_count(leaf, subleaf, eax, ebx, ecx, edx) (*(edx) = 5 << 22, 1)
#define __builtin_cpu_supports(name) 1
#define syscall(...) 0
"""


@pytest.mark.slow
def test_products_by_amx_tiles(here: str, tmp_path: Path) -> None:
    """The code for AMX runs on emulated tiles, which check their use."""
    assert emulated_digest(tmp_path, "amx_bf16", "avx512_bf16", AMX_COMPILER, AMX_DETECTION) == here


@pytest.mark.parametrize("source", sorted((ROOT / "csrc").rglob("*.cpp")), ids=lambda path: path.stem)
def test_the_sources_compile_with_the_integers_of_macos(source: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    integers = str(Path(__file__).with_name("macos_integers.h"))
    command = [
        "g++",
        "-std=c++17",
        "-fsyntax-only",
        "-w",
        "-DCOSPEC_ISA=base",
        f"-I{ROOT / 'csrc'}",
        "-include",
        integers,
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_clang_computes_the_same_bits(here: str, tmp_path: Path) -> None:
    assert digest(tmp_path, "clang++", isas=("avx2",)) == here
