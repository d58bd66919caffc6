"""What pyproject.toml cannot say: a .pth file goes into site-packages, a README without relative links to indexes."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

STARTUP = "lowmem_load_startup.pth"


class BuildWithStartup(build_py):
    """Adds the file that turns lowmem_load on if LOWMEM_LOAD_INSTALL is set: see integrations/startup_hook.py.

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


def published(readme: str) -> str:
    """Return the README as a package index can show it: it has no files of the repository, whose address is not known.

    Pictures go with their captions, and of links to files the text stays.
    """
    without_pictures = re.sub(r"!\[[^\]]*\]\([^)]*\)\n\n(<!-- figure:.*?\n\n)?", "", readme, flags=re.DOTALL)
    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)[^)]*\)", r"\1", without_pictures)


setup(
    cmdclass={"build_py": BuildWithStartup},
    long_description=published((Path(__file__).parent / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
