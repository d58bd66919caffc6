"""The errors of lowmem_load.

Most also derive from a builtin error, so that `except ValueError` keeps working.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence


class LowMemLoadError(Exception):
    """Base class of every error that lowmem_load raises on purpose.

    Example:
        try:
            model = load_model("Qwen/Qwen3-8B", ds_config)
        except LowMemLoadError as error:
            sys.exit(f"the model cannot be loaded: {error}")
    """


class ConfigError(LowMemLoadError, ValueError):
    """A ds_config, a dtype or another argument is malformed, contradictory or cannot be resolved.

    Example:
        try:
            load_model("Qwen/Qwen3-8B", {"zero_optimization": {"stage": 4}})
        except ConfigError as error:
            print(error)
    """


class CheckpointError(LowMemLoadError, ValueError):
    """A checkpoint folder, index or file is absent, unsafe or inconsistent.

    Example:
        try:
            load_model("./no-such-folder", ds_config)
        except CheckpointError as error:
            print(error)
    """


class HeaderError(CheckpointError):
    """A safetensors header is malformed, so nothing of the file is read."""


class ModelBuildError(CheckpointError):
    """A model's own code fails when it is built, without memory, from its configuration. Its error is the cause."""


class TruncatedFileError(CheckpointError):
    """A file ends before the bytes that its header promises."""


class MemoryShortageError(LowMemLoadError, MemoryError):
    """A load does not fit into the host memory of a node or a process, or an allocation failed, also on a device."""


class PlanError(LowMemLoadError, ValueError):
    """A read plan leaves elements of a partition uncovered, or covers some twice."""


class UnsupportedError(LowMemLoadError, NotImplementedError):
    """The request is legal elsewhere, but lowmem_load cannot load or save this combination.

    Example:
        try:
            load_model("Qwen/Qwen3-8B", ds_config, gguf_file="q4.gguf")
        except UnsupportedError as error:
            print(error)
    """


class IncompatibleVersionError(LowMemLoadError, ImportError):
    """An installed release, of DeepSpeed or transformers for example, lacks a function that lowmem_load needs."""


class LoadOrderWarning(UserWarning):
    """A model that is trained under ZeRO-3 was loaded in full on every rank, because no ds_config was active then.

    Example:
        install()
        warnings.simplefilter("error", LoadOrderWarning)  # an error, not a warning
        alive = HfDeepSpeedConfig(ds_config)
    """


class FallbackWarning(UserWarning):
    """Under `install`, the default loader loads a model that lowmem_load cannot load, or a framework lacks a function.

    `install(strict=True)` raises an error instead of falling back to the default loader.

    Example:
        install()
        warnings.simplefilter("ignore", FallbackWarning)
        model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", device_map="cpu")
    """


class RankError(LowMemLoadError, RuntimeError):
    """One or more ranks failed; the same error is raised on every rank.

    Attributes:
        failures: message of each rank that failed, by rank.

    Example:
        try:
            save_model(model, "out")
        except RankError as error:
            print(error.failures)
    """

    def __init__(self, step: str, failures: Mapping[int, str]) -> None:
        self.failures = dict(failures)
        lines = [f"rank {rank}: {message}" for rank, message in sorted(self.failures.items())]
        super().__init__(f"{step} failed on {len(lines)} rank(s), so it was stopped on all:\n" + "\n".join(lines))


def error_text(error: BaseException, max_chars: int = 1000) -> str:
    """Return class and text of any error, cut to `max_chars` characters: transformers lists all model types, say."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  its __str__ may raise; that must not hide the error
        return f"{type(error).__name__} (its text cannot be had)"
    return text if len(text) <= max_chars else f"{text[:max_chars]} ..."


def outside_level() -> int:
    """Return the `stacklevel` of a warning that names the first caller outside of lowmem_load and transformers."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and f"{frame.f_globals.get('__name__')}.".startswith(("lowmem_load.", "transformers.")):
        level, frame = level + 1, frame.f_back
    return level


def listed(names: Sequence[str], shown: int = 8) -> str:
    """Return names as text; if there are more than `shown`, the first ones and the count."""
    return ", ".join(names[:shown]) + (f", ... ({len(names)} in all)" if len(names) > shown else "")
