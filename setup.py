"""What pyproject.toml cannot say: a .pth file goes into site-packages, beside the package."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

STARTUP = "lowmem_load_startup.pth"


class BuildWithStartup(build_py):
    """Adds the file that switches lowmem_load on where LOWMEM_LOAD_INSTALL says so: lowmem_load/startup/environment.py.

    An editable wheel has nothing of `build_lib`; what it has lies where `install` is told to put it.
    """

    def run(self) -> None:
        """Build the package, then copy the file."""
        super().run()
        self.copy_file(STARTUP, self._folder())

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return the files that are built."""
        return [*super().get_outputs(include_bytecode), str(Path(self._folder()) / STARTUP)]

    def _folder(self) -> str:
        return self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib


setup(cmdclass={"build_py": BuildWithStartup})
