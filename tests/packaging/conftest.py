"""The wheel that users get, built once and installed in a folder of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCES = ["lightning_megatrain", "callbacks", "datamodules", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"]


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Runs `command` and returns what it printed; fails the test with that text where the command fails."""
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


def build_wheel(repository: Path, folder: Path, **env: str) -> Path:
    """Builds a source distribution and from it a wheel, away from the tree, whose build folders may hold modules deleted since."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    for name in SOURCES:
        source = repository / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif source.exists():
            shutil.copy(source, tree / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=tree, env=os.environ | env)
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def install_wheel(wheel: Path, target: Path) -> Path:
    """Installs `wheel` alone: what it depends on comes from the environment that runs the tests."""
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel, cwd=wheel.parent)
    return target


@pytest.fixture(scope="session")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(repository, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to put first on the path."""
    return install_wheel(wheel, tmp_path_factory.mktemp("installed"))
