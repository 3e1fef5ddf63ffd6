"""What an installation gets: the wheel's contents and tag; kernels that are built, left out or asked for in vain."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "hatch_build.py").exists():
    pytest.skip("the sources are not here", allow_module_level=True)
COMPILERS = ("g++", "clang++", "c++")


@pytest.fixture(scope="module")
def hook() -> Any:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, so that a build does not touch the library in use; weights and kernels are small ones."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("LICENSE", "NOTICE", "README.md", "hatch_build.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.safetensors"))
    for path in (ROOT / "src").rglob("*.safetensors"):
        (folder / path.relative_to(ROOT)).write_text("weights")
    (folder / "csrc" / "ops").mkdir(parents=True)
    (folder / "csrc" / "ops" / "kernels.cpp").write_text("static int kernels;\n")
    (folder / "csrc" / "ops" / "ops.cpp").write_text('extern "C" int one() { return 1; }\n')
    return folder


def wheel(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    shutil.rmtree(checkout / "dist", ignore_errors=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("COSPEC_NATIVE", "CXX")}
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    return subprocess.run(command, cwd=checkout, env=clean | environment, capture_output=True, text=True, check=False)


@pytest.fixture
def no_compiler(tmp_path: Path) -> str:
    return str(tmp_path)


def test_wheel_without_kernels(checkout: Path) -> None:
    done = wheel(checkout, COSPEC_NATIVE="off")
    assert done.returncode == 0, done.stderr
    assert "COSPEC_NATIVE is off" in done.stdout + done.stderr
    (built,) = (checkout / "dist").iterdir()
    assert built.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(built).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"cospec", next(top for top in tops if top.endswith(".dist-info"))}
    for path in (ROOT / "src" / "cospec" / "zoo").rglob("*.safetensors"):
        assert str(path.relative_to(ROOT / "src")) in names
    for licence in ("LICENSE", "NOTICE"):
        assert any(name.endswith(f".dist-info/licenses/{licence}") for name in names)
    assert not [name for name in names if "test" in name or name.endswith(".so")]
    assert "cospec/py.typed" in names


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler is installed")
def test_wheel_with_kernels(checkout: Path, hook: Any) -> None:
    done = wheel(checkout, COSPEC_NATIVE="required")
    assert done.returncode == 0, done.stderr
    (built,) = (checkout / "dist").iterdir()
    assert built.name.endswith(f"-py3-none-{hook.platform_tag()}.whl")
    assert "cospec/_native.so" in zipfile.ZipFile(built).namelist()


def test_no_compiler_gives_a_pure_package(checkout: Path, no_compiler: str) -> None:
    done = wheel(checkout, PATH=no_compiler)
    assert done.returncode == 0, done.stderr
    assert "slower because no C++ compiler" in done.stdout + done.stderr
    assert [path.name.endswith("-py3-none-any.whl") for path in (checkout / "dist").iterdir()] == [True]


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"COSPEC_NATIVE": "required", "PATH": ""}, "COSPEC_NATIVE is required"),
        ({"COSPEC_NATIVE": "required", "CXX": "no-such-c++"}, "no-such-c++"),
        ({"COSPEC_NATIVE": "always"}, "COSPEC_NATIVE is 'always'"),
    ],
)
def test_a_build_that_asks_for_kernels_in_vain_fails(
    checkout: Path, environment: dict[str, str], sentence: str
) -> None:
    done = wheel(checkout, **environment)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert not list((checkout / "dist").glob("*.whl"))


@pytest.mark.parametrize(
    ("python", "environment", "tag"),
    [
        ("macosx-10.13-universal2", {}, "macosx_11_0_arm64"),
        ("macosx-11.0-arm64", {"MACOSX_DEPLOYMENT_TARGET": "14.0"}, "macosx_14_0_arm64"),
        ("macosx-10.13-universal2", {"ARCHFLAGS": "-arch arm64"}, "macosx_11_0_arm64"),
        ("linux-aarch64", {}, "linux_aarch64"),
    ],
)
def test_the_tag_names_the_processor_that_was_built_for(
    hook: Any, monkeypatch: pytest.MonkeyPatch, python: str, environment: dict[str, str], tag: str
) -> None:
    for name in ("ARCHFLAGS", "MACOSX_DEPLOYMENT_TARGET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sysconfig, "get_platform", lambda: python)
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert hook.platform_tag() == tag


def test_wheel_platforms() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]
    assert config["environment"]["COSPEC_NATIVE"] == "required"
    assert (config["linux"]["archs"], config["macos"]["archs"]) == (["x86_64", "aarch64"], ["arm64"])


def test_container_copies_and_user() -> None:
    lines = (ROOT / "Containerfile").read_text(encoding="utf-8").splitlines()
    context = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in context if line.startswith("!")}
    copies = [line.split() for line in lines if line.startswith("COPY ") and "--from" not in line]
    copied = [name for words in copies for name in words[1:-1]]
    assert set(copied) == allowed
    assert all((ROOT / name).exists() for name in copied)
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and int(users[-1]) > 0
