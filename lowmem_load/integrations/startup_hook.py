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

TYPE_CHECKING = False  # typing's own would import typing
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from lowmem_load.load.report import LoadReport

SWITCH = "LOWMEM_LOAD_INSTALL"
"""The variable: OFF, ON, or STRICT and NO_DOWNLOAD with a comma, for `install(strict=True, download=False)`."""

OFF, ON, STRICT, NO_DOWNLOAD, STREAM = "0", "1", "strict", "no-download", "stream"  # the last as in 0.3

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


def keywords_of_run() -> dict[str, Any]:
    """Return the keywords of `install` that the variable gives."""
    text = os.environ.get(SWITCH) or OFF
    known = {ON: {}, STRICT: {"strict": True}, NO_DOWNLOAD: {"download": False}, STREAM: {"stream": True}}
    words = text.split(",") if text != OFF else []
    if not known.keys() >= {*words}:
        from lowmem_load.errors import LowMemLoadError

        raise LowMemLoadError(
            f"{SWITCH} is {text!r}; expected {ON}, {STRICT}, {NO_DOWNLOAD}, or {OFF} to leave lowmem_load off"
        )
    return {key: value for word in words for key, value in known[word].items()}


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


# -- acting right after a module is imported ---------------------------------------------------------------------------


def after_import(name: str, act: Callable[[ModuleType], object]) -> Callable[[], None]:
    """Call `act` with a module once the import system has executed it. Return what calls this off."""
    if name in sys.modules:
        act(sys.modules[name])
        return lambda: None
    finder = Finder(name, act)
    sys.meta_path.insert(0, finder)
    return finder.leave


class Finder:
    """Finds a module as the finders behind it do, and acts after it was executed: `find_spec` alone loads nothing."""

    def __init__(self, awaited: str, act: Callable[[ModuleType], object]) -> None:
        self._awaited, self._act = awaited, act

    def leave(self) -> None:
        """Await nothing any more."""
        if sys.meta_path and self in sys.meta_path:  # None when Python ends
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        if name != self._awaited:
            return None
        # Python itself asks the finders in front. One of them may be like this one, and would ask it again.
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._act_after(spec.loader)
        return spec

    def _act_after(self, loader: object) -> None:
        """Replace `exec_module` of this object only: inspect and importlib.resources look at its class.

        The loader of a zip archive is that of all its modules, of which the awaited one may import others.
        """
        execute = loader.exec_module  # type: ignore[attr-defined]  # importlib.abc.Loader declares it for some only

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ != self._awaited:
                return
            vars(loader).pop("exec_module", None)  # another finder may have awaited the same module
            if self in sys.meta_path:  # else nobody waits any more
                self.leave()
                self._act(module)

        loader.exec_module = exec_module  # type: ignore[attr-defined]
