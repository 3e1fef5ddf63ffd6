"""Builds the native kernels where there is a C++ compiler, and a pure Python package where there is none.

The library is free of torch and Python, so that building needs nothing but the compiler. One kernel source is compiled
for several instruction sets; the library chooses between them when it runs, so a wheel serves every processor of its
platform.

Environment:
    COSPEC_NATIVE: ``auto`` builds the kernels where a compiler can, ``required`` fails without them, ``off`` leaves
        them out.
    COSPEC_SANITIZE: ``1`` builds with AddressSanitizer and UndefinedBehaviorSanitizer, for tests; CONTRIBUTING.md has
        the command that loads such a library.
    CXX: the C++ compiler with its options; without it the first of g++, clang++ and c++.
    ARCHFLAGS, MACOSX_DEPLOYMENT_TARGET: on macOS, processors and oldest system of the library.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.macos import process_macos_plat_tag

LIBRARY = Path("src/cospec/_native.so")
# No -ffast-math and no contraction: the order of every sum, and every rounding, is as written.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-w"]
LINK = ["-shared", "-pthread"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g1", "-O1"]
LINK_MACOS = ["-Wl,-install_name,@rpath/_native.so"]  # otherwise the name is the path of a temporary folder
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
VNNI = [*AVX512, "-mavx512vnni"]
BF16 = [*VNNI, "-mavx512bf16"]
ISAS = {
    "avx2": AVX2,
    "avx_vnni": [*AVX2, "-mavxvnni"],
    "avx512": AVX512,
    "avx512_vnni": VNNI,
    "avx512_bf16": BF16,
    "amx_bf16": [*BF16, "-mamx-tile", "-mamx-bf16"],
    "neon_dot": ["-march=armv8.2-a+dotprod"],
    "neon_i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
}
KNOWN = "defined(__x86_64__) || defined(__aarch64__)"  # processors with instruction sets besides the base
NATIVE = ("auto", "required", "off")


class BuildFailed(Exception):
    """Why there is no native library, as the end of a sentence."""


def compiler() -> list[str]:
    """The C++ compiler to use and its options: ``CXX``, or the first that is found.

    Raises:
        BuildFailed: there is none, or ``CXX`` names one that is not there.
    """
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked and not shutil.which(asked[0]):
        raise BuildFailed(f"CXX names {asked[0]}, which was not found")
    for command in (asked, ["g++"], ["clang++"], ["c++"]):
        if command and shutil.which(command[0]):
            return command + (shlex.split(os.environ.get("ARCHFLAGS", "")) if sys.platform == "darwin" else [])
    raise BuildFailed("no C++ compiler (g++ or clang++) was found")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["the compiler gave no reason"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise BuildFailed(f"{command[0]} failed: {reason.strip()}")


def _environment() -> dict[str, str]:
    """The environment of the compiler: on macOS the oldest system is the one that the wheel's tag names."""
    if sys.platform != "darwin":
        return dict(os.environ)
    major, minor = platform_tag().split("_")[1:3]
    return {**os.environ, "MACOSX_DEPLOYMENT_TARGET": f"{major}.{minor}"}


def _compiles_for(cxx: list[str], condition: str, folder: Path) -> bool:
    """Whether the compiler takes its options and what it compiles for meets a condition of the preprocessor.

    The compiler is asked, not this machine: a cross-compiler builds for another processor.
    """
    probe = folder / "probe.cpp"
    probe.write_text(f"#if !({condition})\n#error other\n#endif\nint main() {{ return 0; }}\n")
    try:
        _run([*cxx, "-c", str(probe), "-o", str(folder / "probe.o")])
    except BuildFailed:
        return False
    return True


def build(root: Path) -> Path:
    """Compile ``csrc`` under ``root``; returns the path of the library.

    Raises:
        BuildFailed: there is no compiler, or it could not compile the sources.
    """
    sources, target = root / "csrc", root / LIBRARY
    cxx = [*compiler(), f"-I{sources}"]
    sanitize = SANITIZE if os.environ.get("COSPEC_SANITIZE") == "1" else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        isas = {isa: flags for isa, flags in ISAS.items() if _compiles_for([*cxx, *flags], KNOWN, folder)}
        defines = [f"-DCOSPEC_HAS_{isa.upper()}" for isa in isas]
        levels = {"base": [], **isas}
        kernels = sources / "ops" / "kernels.cpp"
        jobs = [(f"kernels_{isa}", kernels, [f"-DCOSPEC_ISA={isa}", *flags]) for isa, flags in levels.items()]
        jobs += [(path.stem, path, defines) for path in sorted(sources.rglob("*.cpp")) if path != kernels]

        def compile_one(job: tuple[str, Path, list[str]]) -> str:
            stem, source, extra = job
            output = str(folder / f"{stem}.o")
            _run([*cxx, *FLAGS, *extra, *sanitize, "-c", str(source), "-o", output])
            return output

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_one, jobs))
        built = folder / LIBRARY.name
        macos = LINK_MACOS if _compiles_for(cxx, "defined(__APPLE__)", folder) else []
        _run([*cxx, *LINK, *sanitize, *macos, *objects, "-o", str(built)])
        # A new file rather than new contents: a running process may have the old one mapped.
        staged = target.with_suffix(".new")
        shutil.copy(built, staged)
        os.replace(staged, target)
    return target


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library next to the Python sources, for wheels and editable installs alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, or say in one sentence why the package stays pure Python.

        Raises:
            BuildFailed: ``COSPEC_NATIVE`` is ``required`` and the kernels cannot be built.
            ValueError: ``COSPEC_NATIVE`` is none of the values that are allowed.
        """
        if self.target_name != "wheel":
            return
        wanted = os.environ.get("COSPEC_NATIVE") or "auto"
        if wanted not in NATIVE:
            raise ValueError(f"COSPEC_NATIVE is {wanted!r}; allowed is one of {', '.join(NATIVE)}")
        try:
            if wanted == "off":
                raise BuildFailed("COSPEC_NATIVE is off")
            build(Path(self.root))
        except BuildFailed as failed:
            if wanted == "required":
                raise BuildFailed(
                    f"COSPEC_NATIVE is required, but there are no native kernels because {failed}"
                ) from None
            (Path(self.root) / LIBRARY).unlink(missing_ok=True)
            self.app.display_warning(f"cospec is installed without its native kernels and is slower because {failed}.")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"
        build_data["artifacts"].append(str(LIBRARY))


def platform_tag() -> str:
    """The last part of the wheel's tag: the system and processor that the library is built for."""
    tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if not tag.startswith("macosx"):
        return tag
    # A Python for two processors says universal2; the compiler builds for this machine, or for what ARCHFLAGS names.
    here = re.sub(r"^(macosx_\d+_\d+)_.*", rf"\1_{platform.machine()}", tag)
    return process_macos_plat_tag(here, compat=False)


if __name__ == "__main__":
    try:
        print(build(Path(__file__).resolve().parent))
    except BuildFailed as failed:
        sys.exit(f"The native kernels were not built because {failed}.")
