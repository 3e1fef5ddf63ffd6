"""Builds the native kernels where there is a C++ compiler, and a pure Python package where there is none.

The library is free of torch and Python, so that building needs nothing but the compiler. One kernel source is compiled
for several instruction sets; the library chooses between them when it runs, so a wheel serves every processor of its
platform.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIBRARY = Path("src/cospec/_native.so")
# No -ffast-math and no contraction: the order of every sum, and every rounding, is as written.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-w"]
AVX2 = ["-mavx2", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
ISAS = {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": [*AVX512, "-mavx512bf16"]}


class BuildFailed(Exception):
    """Why there is no native library, as the end of a sentence."""


def compiler() -> str:
    """The C++ compiler to use: ``CXX``, or the first that is found."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise BuildFailed("no C++ compiler (g++ or clang++) was found")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["it gave no reason"]
        reason = next((line for line in lines if "error" in line), lines[-1])
        raise BuildFailed(f"{command[0]} failed: {reason.strip()}")


def _understands(cxx: list[str], flags: list[str], folder: Path) -> bool:
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    try:
        _run([*cxx, *flags, "-c", str(probe), "-o", str(folder / "probe.o")])
    except BuildFailed:
        return False
    return True


def build(root: Path) -> Path:
    """Compile ``csrc`` under ``root``; returns the path of the library.

    Raises:
        BuildFailed: there is no compiler, or it could not compile the sources.
    """
    sources, target = root / "csrc", root / LIBRARY
    cxx = compiler().split()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        intel = platform.machine().lower() in ("x86_64", "amd64")
        isas = {isa: flags for isa, flags in ISAS.items() if intel and _understands(cxx, flags, folder)}
        defines = [f"-DCOSPEC_HAS_{isa.upper()}" for isa in isas]
        levels = {"base": [], **isas}
        jobs = [(f"kernels_{isa}", "kernels.cpp", [f"-DCOSPEC_ISA={isa}", *flags]) for isa, flags in levels.items()]
        jobs += [(path.stem, path.name, defines) for path in sorted(sources.glob("*.cpp")) if path.stem != "kernels"]

        def compile_one(job: tuple[str, str, list[str]]) -> str:
            stem, source, extra = job
            output = str(folder / f"{stem}.o")
            _run([*cxx, *FLAGS, *extra, "-c", str(sources / source), "-o", output])
            return output

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            objects = list(threads.map(compile_one, jobs))
        built = folder / LIBRARY.name
        _run([*cxx, "-shared", "-pthread", *objects, "-o", str(built)])
        # A new file rather than new contents: a running process may have the old one mapped.
        staged = target.with_suffix(".new")
        shutil.copy(built, staged)
        os.replace(staged, target)
    return target


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the library beside the Python sources, for wheels and editable installs alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, or say in one sentence why the package stays pure Python."""
        if self.target_name != "wheel":
            return
        try:
            build(Path(self.root))
        except BuildFailed as failed:
            (Path(self.root) / LIBRARY).unlink(missing_ok=True)
            self.app.display_warning(f"cospec is installed without its native kernels and is slower because {failed}.")
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"
        build_data["artifacts"].append(str(LIBRARY))


def _platform_tag() -> str:
    import sysconfig

    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    try:
        print(build(Path(__file__).resolve().parent))
    except BuildFailed as failed:
        sys.exit(f"The native kernels were not built because {failed}.")
