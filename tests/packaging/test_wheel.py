"""The wheel holds the whole package under its public names, and nothing else."""

import email
import os
import re
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.packaging.conftest import run
from tests.packaging.test_layout import imported_modules

# Where each folder of the tree is imported from.
FOLDERS = {
    "lightning_megatrain": "lightning_megatrain",
    "callbacks": "lightning_megatrain/callbacks",
    "datamodules": "lightning_megatrain/datamodules",
}


def test_the_wheel_carries_every_source_file(repository: Path, wheel: Path) -> None:
    expected = {
        (Path(mapped) / path.relative_to(repository / folder)).as_posix()
        for folder, mapped in FOLDERS.items()
        for path in (repository / folder).rglob("*")
        if path.suffix in {".py", ".typed", ".yaml", ".c", ".h"}
    }
    carried = set(zipfile.ZipFile(wheel).namelist())
    assert expected - carried == set(), "list the new package under [tool.setuptools] in pyproject.toml"


def test_the_wheel_installs_one_top_level_package(wheel: Path) -> None:
    top_level = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"lightning_megatrain"}


def test_the_wheel_declares_every_package_it_imports(repository: Path, wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    requirements = email.message_from_string(metadata).get_all("Requires-Dist", [])
    declared = {re.split(r"[^\w-]", requirement)[0].lower().replace("-", "_") for requirement in requirements if "dev" not in requirement}
    imported = {module.split(".")[0] for folder in FOLDERS for _, module in imported_modules(repository / folder)}
    providers = packages_distributions()
    for name in imported - sys.stdlib_module_names - {"lightning_megatrain"}:
        assert declared & {provider.lower().replace("-", "_") for provider in providers[name]}, f"{name} is imported and not declared"


@pytest.mark.parametrize("name", ["lightning_megatrain", "lightning_megatrain.callbacks", "lightning_megatrain.datamodules"])
def test_the_installed_wheel_imports_where_the_tree_is_out_of_sight(installed_wheel: Path, tmp_path: Path, name: str) -> None:
    program = f"""
import importlib.util, sys
sys.path.insert(0, {str(installed_wheel)!r})
assert importlib.util.find_spec("callbacks") is None
assert importlib.util.find_spec("datamodules") is None
import {name}
print({name}.__file__)
"""
    imported = run(sys.executable, "-c", program, cwd=tmp_path).splitlines()[-1]
    assert Path(imported).is_relative_to(installed_wheel)


def test_the_installed_wheel_passes_mypy(repository: Path, installed_wheel: Path) -> None:
    run(
        sys.executable, "-m", "mypy",
        "--config-file", repository / "pyproject.toml",
        "--cache-dir", repository / ".mypy_cache",
        "--package", "lightning_megatrain",
        cwd=installed_wheel,
        env=os.environ | {"MYPYPATH": str(installed_wheel)},
    )  # fmt: skip
