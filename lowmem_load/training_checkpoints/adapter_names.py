"""Tells the adapter from its base by the names in the state dict of a model that PEFT has wrapped. Pure.

PEFT puts `base_model.model.` before all names. A layer X that it trains has `X.base_layer.*` and, for each adapter,
`X.lora_A.ADAPTER.weight` and the like; a module that it trains whole `X.original_module.*` and
`X.modules_to_save.ADAPTER.*`. In what its `save_pretrained` writes the adapter's name is left out. Nothing else in a
name is PEFT's, whatever it is called.

Source: peft 0.15 to 0.21 `utils/save_and_load.py`, `tuners/tuners_utils.py` and `tuners/lora/layer.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from lowmem_load.errors import ConfigError, UnsupportedError, listed
from lowmem_load.planning.proof import prove_names

T = TypeVar("T")

OF_PEFT = "base_model.model."

_OF_MODULES = ("lora_A", "lora_B")
"""Have a module for each adapter."""

_OF_PARAMETERS = ("lora_embedding_A", "lora_embedding_B", "trainable_tokens_delta")
"""Have a parameter for each adapter."""

MAGNITUDE = "lora_magnitude_vector"
"""Of DoRA: has a module for each adapter, and in older releases a parameter. Saved without `.weight`."""

TOKENS = "token_adapter"


class Place(NamedTuple):
    """What PEFT has put at the end of a name: the layer, what of it, the adapter (None as saved), and the rest."""

    layer: str
    kind: str
    adapter: str | None
    rest: str

    @property
    def saved(self) -> str:
        """The name by which PEFT saves it."""
        return ".".join(filter(None, (self.layer, self.kind, "" if self.kind == MAGNITUDE else self.rest)))


def place_in(name: str) -> Place | None:
    """Return what LoRA has put at the end of a name; None for a name of the base, or of a module that is saved."""
    *above, first, second, third = ("", "", *name.split("."))
    layer = ".".join(filter(None, above))
    if first in (*_OF_MODULES, MAGNITUDE) and third in ("weight", "bias"):
        return Place(layer, first, second, third)
    below = f"{layer}.{first}" if layer else first
    if second in (*_OF_PARAMETERS, MAGNITUDE):
        return Place(below, second, third, "")
    if second in _OF_MODULES and third in ("weight", "bias"):
        return Place(below, second, None, third)
    if third in (*_OF_PARAMETERS, MAGNITUDE):
        return Place(f"{below}.{second}", third, None, "")
    return None


@dataclass(frozen=True, slots=True)
class Adapted(Generic[T]):
    """The weights of a model that PEFT has wrapped, or an adapter alone.

    Attributes:
        base: of the base model, under its own names.
        saved: of the adapter, under the names by which PEFT saves them, as far as names tell.
        adapter: its name; None if these are tensors that PEFT's `save_pretrained` has named.
        wrapped: all of them, under PEFT's names.
        own: the names among `wrapped` that are those of `saved`.
    """

    base: dict[str, T]
    saved: dict[str, T]
    adapter: str | None
    wrapped: Mapping[str, T]
    own: tuple[str, ...]


def is_adapter(names: Collection[str]) -> bool:
    """Whether these are the names of a model that PEFT has wrapped with LoRA, or of an adapter of LoRA."""
    return all(name.startswith(OF_PEFT) for name in names) and any(map(place_in, names))


def adapted(where: str, weights: Mapping[str, T]) -> Adapted[T]:
    """Return the weights of the base model and those of the adapter, given names that all begin as PEFT's do.

    Raises:
        ConfigError: there are several adapters.
        UnsupportedError: the adapter is not of LoRA, and its base is there, too.
        CheckpointError: two names become one.
    """
    whole = _whole_modules(weights, ())
    places = {name: place for name in weights if name not in whole and (place := place_in(name)) is not None}
    adapters = {adapter for _, adapter, _ in whole.values()}
    adapters |= {place.adapter for place in places.values() if place.adapter is not None}
    whole |= _whole_modules([name for name in weights if name not in places], adapters)
    if len(adapters) > 1:
        raise ConfigError(f"{where}: holds the adapters {listed(sorted(adapters))}; only one can be written")
    if not adapters:
        if not places and (inside := [name for name in weights if ".base_layer." in name]):
            raise UnsupportedError(
                f"{where}: {inside[0]}: holds an adapter that is not of LoRA, and its base; save the adapter with "
                "PEFT's save_pretrained"
            )
        return Adapted({}, dict(weights), None, weights, tuple(weights))
    layers = {place.layer for place in places.values()}
    originals = {module for module, _, _ in whole.values()}
    names: dict[str, tuple[bool, str]] = {}  # whether it is the adapter's, and its name there
    for name in weights:
        if name in places:
            names[name] = True, places[name].saved
        elif name in whole:
            module, _, rest = whole[name]
            names[name] = True, f"{module}.{rest}"
        else:
            names[name] = False, _of_base(name, layers, originals).removeprefix(OF_PEFT)
    prove_names(where, weights, names)
    base, saved = (
        {new: weights[name] for name, (is_saved, new) in names.items() if is_saved is wanted}
        for wanted in (False, True)
    )
    own = tuple(name for name, (is_saved, _) in names.items() if is_saved)
    return Adapted(base, saved, adapters.pop(), weights, own)


def _whole_modules(names: Collection[str], adapters: Collection[str]) -> dict[str, tuple[str, str, str]]:
    """Return the module, the adapter and the name in it for tensors of modules that PEFT trains whole."""
    split = {name: name.split(".") for name in names}
    wrappers = {
        ".".join(parts[:place])
        for parts in split.values()
        for place, part in enumerate(parts)
        if part == "original_module"
    }
    found = {}
    for name, parts in split.items():
        for place in range(len(parts) - 2):
            module, adapter = ".".join(parts[:place]), parts[place + 1]
            if parts[place] == "modules_to_save" and (module in wrappers or adapter in adapters):
                found[name] = module, adapter, ".".join(parts[place + 2 :])
                break
    return found


def _of_base(name: str, layers: Collection[str], originals: Collection[str]) -> str:
    kept, above = [], ""
    for part in name.split("."):
        below = f"{above}.{part}" if above else part
        is_wrapper = (
            (part == "base_layer" and above in layers)
            or (part == TOKENS and below in layers)
            or (part == "original_module" and above in originals)
        )
        if not is_wrapper:
            kept.append(part)
        above = below
    return ".".join(kept)
