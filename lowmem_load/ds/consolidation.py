"""How an engine is kept from gathering its weights when somebody asks it for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lowmem_load.contract import require
from lowmem_load.ds.releases import SUPPORTED

_STATE, _MAY_GATHER = "_zero3_consolidated_16bit_state_dict", "zero_gather_16bit_weights_on_model_save"


def _check_contract() -> None:
    """Raise IncompatibleVersionError unless DeepSpeed has what this module relies on."""
    require(SUPPORTED, {"deepspeed:DeepSpeedEngine": (_STATE, _MAY_GATHER)})


_check_contract()


@contextlib.contextmanager
def consolidates_to(engine: Any, state: dict[str, Any] | None) -> Iterator[None]:
    """Inside, the engine gives `state` where it is asked for all weights of ZeRO-3, whatever its ds_config says.

    Source: deepspeed 0.19.8 `runtime/engine.py`, `save_16bit_model`; accelerate 1.15 `Accelerator.get_state_dict`.
    """
    setattr(engine, _STATE, lambda *_, **__: state)
    setattr(engine, _MAY_GATHER, lambda: True)
    try:
        yield
    finally:
        delattr(engine, _STATE)
        delattr(engine, _MAY_GATHER)
