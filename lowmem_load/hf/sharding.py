"""How transformers shards a model: by a `DistributedConfig`, or block by block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from lowmem_load.errors import ConfigError, UnsupportedError


def distributed_config(sizes: Mapping[str, int]) -> Any:
    """Return a `DistributedConfig` of these sizes: fsdp_size, tp_size, ..."""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError as error:
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no DistributedConfig; install transformers 5.13 or newer"
        ) from error
    try:
        return DistributedConfig(**sizes)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"DistributedConfig({dict(sizes)}): {error}") from error


def is_distributed_config(value: object) -> bool:
    """Return whether this is a `DistributedConfig` of transformers 5."""
    return type(value).__name__ == "DistributedConfig" and type(value).__module__.startswith("transformers.")


def is_kept_on_host(model: Any) -> bool:
    """Return whether the `DistributedConfig` of a model keeps its shards in host memory."""
    return bool(getattr(getattr(model.config, "distributed_config", None), "fsdp_cpu_offload", False))


def refuse_parted(model: Any) -> None:
    """Refuse a tensor-parallel plan by which some ranks would hold gates only, as transformers has for Inkling."""
    config = getattr(model.config, "distributed_config", None)
    for name, style in (model.tp_plan if (getattr(config, "tp_size", None) or 1) > 1 else {}).items():
        if style == "colwise" and name.endswith(".gate_up_proj"):
            raise UnsupportedError(
                f"{name}: the plan of {type(model).__name__} shards it by 'colwise', which parts gates from what they "
                f"gate; pass DistributedConfig(..., tp_plan={{{name!r}: 'packed_colwise'}})"
            )


def blocks(model: Any) -> list[Any]:
    """Return the modules that a model does not want to be split, those inside others first, as FSDP2 shards them."""
    whole = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in whole][::-1]
