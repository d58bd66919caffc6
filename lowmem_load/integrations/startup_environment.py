"""The environment that switches lowmem_load on in a process and in all that it starts.

[Note: two ways in] A process is reached when its interpreter starts, in one of two ways:

- PYTHONPATH names the folder `on_pythonpath`, whose `sitecustomize.py` Python imports. That needs nothing installed but
  this package, and launchers hand PYTHONPATH on, also to other nodes (deepspeed 0.19.8, launcher/runner.py,
  EXPORT_ENVS). `python -I` and `-E` do not read it.
- LOWMEM_LOAD_INSTALL is set, and `lowmem_load_startup.pth` lies in site-packages, where setup.py puts it. That needs
  one variable alone, whatever becomes of PYTHONPATH. Python reads no such file in a folder that PYTHONPATH names.

Both lead to `hook.watch`. `lowmem-load run` sets both.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # typing's own would import typing
if TYPE_CHECKING:
    from collections.abc import Mapping

SWITCH = "LOWMEM_LOAD_INSTALL"
"""The variable: OFF, ON, or STRICT, which is `install(strict=True)`."""

OFF, ON, STRICT = "0", "1", "strict"

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "on_pythonpath")
"""What PYTHONPATH names."""


def switched_on(environment: Mapping[str, str], *, strict: bool = False) -> dict[str, str]:
    """Return an environment with lowmem_load switched on in it.

    What is on PYTHONPATH keeps its order and spelling, behind `FOLDER`; an entry that is empty means the current folder
    there, so none is added.
    """
    before = environment.get("PYTHONPATH", "")
    others = [entry for entry in before.split(os.pathsep) if entry != FOLDER] if before else []
    return {**environment, SWITCH: STRICT if strict else ON, "PYTHONPATH": os.pathsep.join([FOLDER, *others])}
