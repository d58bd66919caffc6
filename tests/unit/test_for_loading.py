"""for_loading: what is left of an active ds_config for a load, and that resolve_auto accepts it."""

from __future__ import annotations

from typing import Any

import pytest

from lowmem_load.settings.ds_config import for_loading, resolve_auto
from lowmem_load.settings.precision import Precision


def active() -> dict[str, Any]:
    return {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "stage3_gather_16bit_weights_on_model_save": "auto",
            "offload_param": {"device": "cpu", "pin_memory": "auto"},
        },
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "steps_per_print": 5,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "train_batch_size": 3,  # of a training loop that counts one rank
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": "auto",
    }


def test_keeps_what_loading_reads() -> None:
    given = active()
    assert for_loading(given) == {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "cpu"}},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "steps_per_print": 5,
        "train_micro_batch_size_per_gpu": 1,
    }
    assert given == active()


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_resolves_whatever_the_batch_sizes_were(world_size: int) -> None:
    resolved = resolve_auto(for_loading(active()), world_size=world_size, hidden_size=32, precision=Precision.FP32)
    assert resolved["zero_optimization"]["reduce_bucket_size"] == 32 * 32
    assert resolved["bf16"] == {"enabled": False}
    assert resolved["train_micro_batch_size_per_gpu"] == 1


def test_deepspeeds_own_auto_stays() -> None:
    own = {"zero_optimization": {"stage": 3}, "data_types": {"keep_in_fp32_modules": "auto"}}
    assert for_loading(own)["data_types"] == {"keep_in_fp32_modules": "auto"}
