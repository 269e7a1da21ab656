"""The tree keeps the arrows and the words that the design promises."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def imported_modules(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yields every name that the files under `folder` import, anywhere in them."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative imports cannot cross the mapped folders; write lightning_megatrain..."
                yield from ((path, f"{node.module}.{alias.name}") for alias in node.names)


def is_inside(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


# What each part may import of this package, itself included.
ARROWS = {
    "engine": {"engine"},
    "optim": {"optim"},
    "strategy": {"strategy", "engine", "optim"},
    "language_model": {"language_model", "strategy", "engine", "model_ops", "datamodules"},
    "model_ops": {"model_ops", "engine"},
    "datamodules": {"datamodules"},
    "callbacks": {"callbacks", "model_ops", "datamodules", "loader_place"},
}
FOLDERS = {
    "engine": "lightning_megatrain/engine",
    "optim": "lightning_megatrain/optim",
    "strategy": "lightning_megatrain/strategy",
    "language_model": "lightning_megatrain/language_model",
    "model_ops": "lightning_megatrain/model_ops",
    "datamodules": "datamodules",
    "callbacks": "callbacks",
}


@pytest.mark.parametrize("part", ARROWS)
def test_imports_point_one_way(repository: Path, part: str) -> None:
    allowed = [f"lightning_megatrain.{other}" for other in ARROWS[part]]
    against_the_arrows = [
        f"{path.relative_to(repository)} imports {module}"
        for path, module in imported_modules(repository / FOLDERS[part])
        if is_inside(module, "lightning_megatrain") and not is_inside(module, *allowed)
    ]
    assert against_the_arrows == []


@pytest.mark.parametrize("part", ["engine", "optim"])
def test_the_engine_and_the_optimizers_know_nothing_of_lightning(repository: Path, part: str) -> None:
    imported = {module for _, module in imported_modules(repository / FOLDERS[part])}
    assert [
        module for module in imported if is_inside(module, "lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")
    ] == []


def test_one_module_of_the_engine_at_most_names_torch_cuda(repository: Path) -> None:
    naming = [
        path.name
        for path in (repository / "lightning_megatrain/engine").rglob("*.py")
        if any(isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda" for node in ast.walk(ast.parse(path.read_text())))
    ]
    assert len(naming) <= 1, naming


def test_no_file_names_a_folder_of_somebodys_machine(repository: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=True).stdout.split("\0")
    private = re.compile(r"(?<![\w.~/:}-])/(work|farm|root|home|Users|tmp|opt)/\w")
    found = []
    for name in filter(None, tracked):
        path = repository / name
        if not path.is_file():
            continue  # deleted, and the deletion not committed yet
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue  # a picture or another binary file
        found += [f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if private.search(line)]
    assert found == []
