"""Switches lowmem_load on in a process and in all that it starts, by the environment.

[Note: two ways in] A Python process finds this module when it starts, in one of two ways:

- PYTHONPATH names the folder `on_pythonpath`, whose `sitecustomize.py` Python imports. This needs only the package, and
  launchers pass PYTHONPATH on, also to other nodes (deepspeed 0.19.8, launcher/runner.py, EXPORT_ENVS). `python -I` and
  `-E` ignore it.
- LOWMEM_LOAD_INSTALL is set, and `lowmem_load_startup.pth` lies in site-packages, where setup.py puts it. This works
  whatever happens to PYTHONPATH. Python reads no such file in a folder that PYTHONPATH names.

Both call `watch`. `lowmem-load run` sets both.

Every Python process of a job imports this module, and most never load a model. So it imports next to nothing, not even
typing.
"""

from __future__ import annotations

import os
import sys

from lowmem_load.integrations.switch import NO_DOWNLOAD, OFF, ON, STRICT, SWITCH, Finder, after_import, keywords_of_run

TYPE_CHECKING = False  # typing's own would import typing
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lowmem_load.load.report import LoadReport

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "on_pythonpath")
"""The entry of PYTHONPATH."""

AWAITED = "transformers.modeling_utils"
"""The module that defines `PreTrainedModel`. No model loads without it, and tokenizers do not need it."""

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables in which launchers give a process its rank. The first one set counts."""


def switched_on(environment: Mapping[str, str], *, strict: bool = False, download: bool = True) -> dict[str, str]:
    """Return a copy of an environment with lowmem_load switched on. Other entries of PYTHONPATH keep their order."""
    before = environment.get("PYTHONPATH", "")
    # Not [""]: an empty entry means the current folder.
    others = [entry for entry in before.split(os.pathsep) if entry != FOLDER] if before else []
    keywords = ",".join([STRICT] * strict + [NO_DOWNLOAD] * (not download)) or ON
    return {**environment, SWITCH: keywords, "PYTHONPATH": os.pathsep.join([FOLDER, *others])}


def watch() -> None:
    """Call `switch_on` before the first load of this process, unless the environment turns that off."""
    if os.environ.get(SWITCH) not in ("", OFF) and not any(isinstance(finder, Finder) for finder in sys.meta_path):
        after_import(AWAITED, lambda module: before_first_load(module.PreTrainedModel, switch_on))


def before_first_load(model_class: type, prepare: Callable[[], None]) -> None:
    """Have `prepare` called in the first load of a model, which then begins again. While it fails, so do all loads."""
    import functools
    import threading

    lock = threading.Lock()
    is_prepared = False

    def stand_in(name: str, ordinary: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(ordinary)
        def load(cls: type, *args: object, **kwargs: object) -> object:
            nonlocal is_prepared
            if is_prepared:
                return ordinary(cls, *args, **kwargs)
            with lock:
                if not is_prepared:
                    prepare()
                    is_prepared = True
            # From `model_class`: `cls` may have a method of its own, which has called this one.
            return vars(model_class)[name].__get__(None, cls)(*args, **kwargs)

        return load

    for name in ("from_pretrained", "_from_config"):  # the methods that every load goes through
        if name in vars(model_class):
            setattr(model_class, name, classmethod(stand_in(name, vars(model_class)[name].__func__)))


def switch_on() -> None:
    """Call `install`. Rank 0 prints that, and a summary at the end of each load."""
    import warnings

    from lowmem_load.errors import FallbackWarning, LoadOrderWarning, LowMemLoadError

    keywords = keywords_of_run()
    try:
        from lowmem_load.integrations.install import install

        install(**keywords, on_load=_print_summary)
    except (ImportError, LowMemLoadError) as error:  # code around a load may take the first for an absent package
        raise LowMemLoadError(
            f"lowmem_load is switched on for this process, but cannot be installed in it: {error}\n"
            f"To go on without it, start the job without `lowmem-load run`, or with {SWITCH}={OFF}"
        ) from error
    # These are what `run` is for: PYTHONWARNINGS=ignore must not hide them.
    warnings.simplefilter("default", FallbackWarning)
    warnings.simplefilter("error" if keywords.get("strict") else "default", LoadOrderWarning)
    if next((os.environ[name] for name in RANKS if os.environ.get(name)), "0") == "0":
        _print("on: models for ZeRO-3 or FSDP2 go straight into their shards")


def _print_summary(report: LoadReport) -> None:
    if report.rank == 0:
        _print(str(report))


def _print(text: str) -> None:
    sys.stderr.write(f"lowmem_load: {text}\n")
    sys.stderr.flush()
