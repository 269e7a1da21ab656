"""Builds the optimizer's kernel into the wheel; everything else is in pyproject.toml.

The kernel is a plain shared library (no Python headers), so one wheel serves every Python version of its platform. Without a C compiler
the package is built all the same, as a wheel for any platform, and the optimizer computes in torch.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIBRARY = "lightning_megatrain.optim.libhost_adamw"
SOURCE = "lightning_megatrain/optim/host_adamw.c"
HEADERS = ["lightning_megatrain/optim/number_forms.h", "lightning_megatrain/optim/moment_codes.h"]
# No -ffast-math and no contraction: every clone, and the same steps in torch, must give the same bits.
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"]


def compiler() -> list[str]:
    """The C compiler as a command: $CC, cc, gcc or clang; empty where there is none, and on Windows."""
    if sys.platform == "win32":
        return []
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    return []


class BuildLibrary(build_ext):
    """Compiles the source into a library without Python's name tags."""

    def get_ext_filename(self, fullname: str) -> str:
        """Name the file: nothing of it depends on the Python version."""
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile; a compiler that knows no function clones gets the plain form, one that fails is a warning."""
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        for extra in ([], ["-DNO_CLONES"]):
            command = [*compiler(), *FLAGS, *extra, SOURCE, "-o", str(target), "-lm"]
            if subprocess.run(command, check=False).returncode == 0:  # noqa: S603 - the user's own compiler
                return
        self.warn(f"{shlex.join(command)} failed: HostAdamW will compute in torch, ten times slower")
        target.unlink(missing_ok=True)
        ext.optional = True  # nothing to copy is no error


class PlatformWheel(bdist_wheel):
    """Tags the wheel with its platform, and with any Python version."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return (python, abi, platform)."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(
    ext_modules=[Extension(LIBRARY, [SOURCE], depends=HEADERS, optional=True)] if compiler() else [],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel},
)
