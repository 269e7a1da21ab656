"""The optimizer's compiled kernel reaches users who have no compiler, and nobody needs one to install the package."""

import os
import sys
import zipfile
from pathlib import Path

from tests.packaging.conftest import build_wheel, install_wheel, run

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


def test_the_kernel_runs_where_there_is_no_compiler(installed_wheel: Path, tmp_path: Path) -> None:
    env = os.environ | without_a_compiler(tmp_path / "bin")
    printed = run(sys.executable, "-W", "error::UserWarning", "-c", STEP, installed_wheel, cwd=tmp_path, env=env)
    assert printed.splitlines()[-1].startswith("True")


def test_the_package_builds_and_runs_without_a_compiler(repository: Path, installed_wheel: Path, tmp_path: Path) -> None:
    bare = without_a_compiler(tmp_path / "bin")
    wheel = build_wheel(repository, tmp_path / "build", **bare)
    installed = install_wheel(wheel, tmp_path / "installed")

    with_kernel = run(sys.executable, "-c", STEP, installed_wheel, cwd=tmp_path).splitlines()[-1]
    printed = run(sys.executable, "-c", STEP, installed, cwd=tmp_path, env=os.environ | bare)

    assert "without its compiled kernel" in printed
    assert printed.splitlines()[-1] == with_kernel.replace("True", "False")
