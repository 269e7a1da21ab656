"""The wheel holds the whole package under its public names, and nothing else; its compiled kernel reaches users who have no compiler.

In one file, as tests that lie together run in one process, which builds the wheel once.
"""

import email
import os
import re
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests.packaging.conftest import build_wheel, install_wheel, run
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


# Prints where the package and each of its named parts come from, each part being the first that its process imports.
IMPORTS = """
import importlib, importlib.util, multiprocessing, sys
sys.path.insert(0, sys.argv[1])
assert importlib.util.find_spec("callbacks") is None
assert importlib.util.find_spec("datamodules") is None
import lightning_megatrain
print(lightning_megatrain.__file__)

def print_file(name):
    print(importlib.import_module(name).__file__)

for name in sys.argv[2:]:
    child = multiprocessing.get_context("fork").Process(target=print_file, args=(name,))
    child.start()
    child.join()
    assert child.exitcode == 0, name
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_the_installed_wheel_imports_where_the_tree_is_out_of_sight(installed_wheel: Path, tmp_path: Path) -> None:
    parts = ["callbacks", "datamodules"]
    names = [f"lightning_megatrain.{part}" for part in parts]
    imported = [Path(line) for line in run(sys.executable, "-c", IMPORTS, installed_wheel, *names, cwd=tmp_path).splitlines()]
    assert imported == [installed_wheel / "lightning_megatrain" / part / "__init__.py" for part in ["", *parts]]


def test_the_installed_wheel_passes_mypy(repository: Path, installed_wheel: Path) -> None:
    run(
        sys.executable, "-m", "mypy",
        "--config-file", repository / "pyproject.toml",
        "--cache-dir", repository / ".mypy_cache",
        "--package", "lightning_megatrain",
        cwd=installed_wheel,
        env=os.environ | {"MYPYPATH": str(installed_wheel)},
    )  # fmt: skip


# One AdamW step; prints whether the kernel ran it, and the weight.
STEP = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from lightning_megatrain.optim import HostAdamW, kernel
assert kernel.__file__.startswith(sys.argv[1])
weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.tensor([1.0, -2.0, 0.5])
HostAdamW([weight], lr=0.1).step()
print(kernel.load() is not None, weight.tolist())
"""


def without_a_compiler(folder: Path) -> dict[str, str]:
    """The environment of a machine on which no program can be found."""
    folder.mkdir()
    return {"PATH": str(folder), "CC": str(folder / "cc")}


def test_the_wheel_carries_the_kernel_and_says_for_which_platform(wheel: Path) -> None:
    carried = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", ".dylib", ".dll"))]
    assert [Path(name).parent.as_posix() for name in carried] == ["lightning_megatrain/optim"]
    python, abi, platform = wheel.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none"), "the kernel knows no Python: one wheel serves every version"
    assert platform != "any"


@pytest.fixture(scope="module")
def printed_without_a_compiler(installed_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the step prints with the wheel that users get, where nothing can be compiled."""
    folder = tmp_path_factory.mktemp("bare")
    env = os.environ | without_a_compiler(folder / "bin")
    return run(sys.executable, "-W", "error::UserWarning", "-c", STEP, installed_wheel, cwd=folder, env=env).splitlines()[-1]


def test_the_kernel_runs_where_there_is_no_compiler(printed_without_a_compiler: str) -> None:
    assert printed_without_a_compiler.startswith("True")


def test_the_package_builds_and_runs_without_a_compiler(repository: Path, printed_without_a_compiler: str, tmp_path: Path) -> None:
    bare = without_a_compiler(tmp_path / "bin")
    wheel = build_wheel(repository, tmp_path / "build", **bare)
    installed = install_wheel(wheel, tmp_path / "installed")

    printed = run(sys.executable, "-c", STEP, installed, cwd=tmp_path, env=os.environ | bare)

    assert "without its compiled kernel" in printed
    assert printed.splitlines()[-1] == printed_without_a_compiler.replace("True", "False")
