"""Decides between bf16, fp16 and fp32 from a ds_config and training arguments. docs/precision.md lists every case."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from typing import Any, Literal

from lowmem_load.config.ds_config import AUTO
from lowmem_load.errors import ConfigError

_BF16 = "bf16"
_FP16 = "fp16"
# Source: deepspeed 0.19.8 runtime/precision_config.py:31, read only where "bf16" is absent or null.
_BF16_OLD = "bfloat16"


class Precision(enum.Enum):
    """The type of the parameters, by the name of the torch dtype."""

    BF16 = "bfloat16"
    FP16 = "float16"
    FP32 = "float32"


def precision_of(
    ds_config: Mapping[str, Any],
    *,
    absent: Literal["auto", "disabled"],
    trainer_bf16: bool | None = None,
    trainer_fp16: bool | None = None,
) -> Precision:
    """Return the precision that a ds_config and the training arguments (None: there are none) agree on.

    A training argument replaces a ds_config value that is absent or "auto". A value that is still open is the opposite
    of the other one. If both are open, the answer is bf16. `absent` says how to read a section without "enabled" that
    no training argument replaces: as DeepSpeed does, or "auto", for a caller that then calls `with_precision`.
    """
    contradictions = []
    on: dict[str, bool | None] = {}
    origin = {}
    sections = ((_BF16, _bf16_section_name(ds_config), trainer_bf16), (_FP16, _FP16, trainer_fp16))
    for name, section, trainer in sections:
        if not (trainer is None or isinstance(trainer, bool)):
            raise ConfigError(f"TrainingArguments.{name}: expected True or False, got {trainer!r}")
        enabled = _enabled(ds_config, section)
        if enabled is None and absent == "disabled" and trainer is None:
            enabled = False
        if isinstance(enabled, bool):
            on[name], origin[name] = enabled, f"ds_config {name}.enabled"
            if trainer not in (None, enabled):
                contradictions.append(f"ds_config {name}.enabled={enabled} vs TrainingArguments.{name}={trainer}")
        else:
            on[name], origin[name] = trainer, f"TrainingArguments.{name}"
    if contradictions:
        raise ConfigError(
            f"{' and '.join(contradictions)}: ds_config and training arguments contradict each other; "
            'make them equal, or write "auto" in the ds_config to follow the training arguments'
        )
    bf16 = on[_BF16] if on[_BF16] is not None else not on[_FP16]
    fp16 = on[_FP16] if on[_FP16] is not None else not bf16
    if bf16 and fp16:
        raise ConfigError(
            f"bf16 and fp16 are both enabled ({origin[_BF16]}=True, {origin[_FP16]}=True): disable one of them"
        )
    return Precision.BF16 if bf16 else Precision.FP16 if fp16 else Precision.FP32


def with_precision(ds_config: Mapping[str, Any], precision: Precision) -> dict[str, Any]:
    """Return a deep copy of a ds_config in which bf16.enabled and fp16.enabled are explicit booleans.

    A section under the old name "bfloat16" becomes "bf16", because Hugging Face reads only that.
    """
    resolved = copy.deepcopy(dict(ds_config))
    bf16 = _section(resolved, _bf16_section_name(resolved))
    fp16 = _section(resolved, _FP16)
    resolved.pop(_BF16_OLD, None)
    resolved[_BF16] = {**bf16, "enabled": precision is Precision.BF16}
    resolved[_FP16] = {**fp16, "enabled": precision is Precision.FP16}
    return resolved


def _bf16_section_name(ds_config: Mapping[str, Any]) -> str:
    return _BF16_OLD if ds_config.get(_BF16) is None and _BF16_OLD in ds_config else _BF16


def _section(ds_config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = ds_config.get(name, {})
    # DeepSpeed reads a null "bf16" as absent, but fails on a null "fp16" or "bfloat16".
    if section is None and name == _BF16:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(
            f'ds_config {name}: expected an object such as {{"enabled": true}}, got {section!r}; '
            "write one, or remove the key"
        )
    return section


def _enabled(ds_config: Mapping[str, Any], name: str) -> bool | Literal["auto"] | None:
    section = _section(ds_config, name)
    if "enabled" not in section:
        return None
    enabled: bool | Literal["auto"] = section["enabled"]
    if not isinstance(enabled, bool) and enabled != AUTO:  # 1 == True, and Hugging Face and DeepSpeed differ on 1
        raise ConfigError(f'ds_config {name}.enabled: expected true, false or "auto", got {enabled!r}')
    return enabled
