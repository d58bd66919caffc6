"""Which modules of a model ZeRO-3 partitions: chosen by name, glob, class or predicate, and remembered on the modules.

[Note: chosen modules] A chosen module is partitioned with all that lies below it, so only topmost ones are named. A
parameter that a chosen and another module share cannot be both partitioned and whole; that is refused, never guessed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from lowmem_load.config.settings import Choice, Partition, choices_of
from lowmem_load.errors import ConfigError, listed

MARK = "lowmem_load_partitioned"
"""Attribute of a module that was loaded with all parameters below it partitioned."""


def choose(model: nn.Module, partition: Partition, *, must_match: bool = True) -> dict[str, nn.Module]:
    """Return the topmost chosen modules by name, in the order of the model; "" is the model itself."""
    entries = choices_of(partition)
    hits = [0] * len(entries)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        matching = [number for number, entry in enumerate(entries) if _matches(entry, name, module)]
        for number in matching:
            hits[number] += 1
        if matching and not is_below(name, found):
            found[name] = module
    idle = [entry for entry, count in zip(entries, hits, strict=True) if not count]
    if idle and must_match:
        names = [name for name, _ in model.named_modules() if name]
        raise ConfigError(
            f"partition: {', '.join(getattr(entry, '__name__', repr(entry)) for entry in idle)} choose(s) no module of "
            f"{type(model).__name__}; its modules are {listed(names)}"
        )
    empty = [name for name, module in found.items() if next(module.parameters(), None) is None]
    if empty and must_match:
        raise ConfigError(f"partition: {listed(empty)} hold(s) no parameter, so there is nothing to partition")
    return {name: module for name, module in found.items() if name not in empty}


def check_ties(model: nn.Module, chosen: dict[str, nn.Module]) -> None:
    """Raise ConfigError for parameters that a chosen and another module share; see [Note: chosen modules]."""
    inside = chosen_parameters(chosen)
    shared = [
        (prefix, f"{prefix}.{name}" if prefix else name)
        for prefix, module in model.named_modules()
        if not is_below(prefix, chosen)
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(parameter) in inside
    ]
    if shared:
        owners = sorted({repr(prefix) for prefix, _ in shared})
        raise ConfigError(
            f"partition: {listed([name for _, name in shared])} is tied to a parameter of a chosen module, so it "
            f"would be partitioned without being gathered; choose {listed(owners)} too"
        )


def chosen_parameters(chosen: Mapping[str, nn.Module]) -> set[int]:
    """Return the ids of all parameters of the chosen modules."""
    return {id(parameter) for module in chosen.values() for parameter in module.parameters()}


def mark(chosen: Iterable[nn.Module]) -> None:
    """Remember on the modules themselves, which PEFT and composite modules keep, that they are partitioned."""
    for module in chosen:
        setattr(module, MARK, True)


def partitioned_modules(model: nn.Module, is_partitioned: Callable[[torch.Tensor], bool]) -> dict[str, nn.Module]:
    """Return the topmost modules that are partitioned already, by name.

    These are the marked ones. Where a model was partitioned by other means, they are the modules of which all
    parameters are partitioned, and those that own a partitioned one beside whole ones further below.
    """
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=True):
        if not is_below(name, found) and (_marked(module) or _partitioned_unmarked(module, is_partitioned)):
            found[name] = module
    return found


def _marked(module: nn.Module) -> bool:
    # Not getattr: wrappers such as PeftModel answer for what they wrap, and also hold parameters of their own.
    return bool(vars(module).get(MARK, False))


def _partitioned_unmarked(module: nn.Module, is_partitioned: Callable[[torch.Tensor], bool]) -> bool:
    if any(is_partitioned(parameter) for parameter in module.parameters(recurse=False)):
        return True
    parameters = list(module.parameters())  # no module above a marked one, which may be called on its own
    return bool(parameters) and all(map(is_partitioned, parameters)) and not any(map(_marked, module.modules()))


def _matches(entry: Choice, name: str, module: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    if not name:  # the model itself: a predicate that is about names below it would choose everything there
        return False
    return fnmatch.fnmatchcase(name, entry) if isinstance(entry, str) else bool(entry(name, module))


def is_below(name: str, chosen: Iterable[str]) -> bool:
    """Whether the module or parameter of this name is a chosen one or lies below one."""
    return any(not top or name == top or name.startswith(f"{top}.") for top in chosen)
