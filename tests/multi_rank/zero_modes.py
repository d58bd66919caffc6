"""The ZeRO-3 modes that are compared with DeepSpeed's own loads: `test_modes.py`."""

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Mode:
    """A ds_config to load under: what it adds to zero_optimization and at top level, "{swap}" being a folder.

    `needs_gpu` says why it cannot run on CPU ranks. Loads are compared also where no engine trains on them.
    """

    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bf16"
    num_ranks: int = 2
    needs_gpu: str = ""
    trains_on_cpu: bool = True


def _nvme(**more: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": "{swap}", "pin_memory": False, "buffer_count": 8, **more}


# Unpinned first: stock and streamed differ in nothing but where partitions are born.
_BUFFERS = {"buffer_size": 20_000_000}
MODES: dict[str, Mode] = {
    "bf16": Mode(),
    "fp32": Mode(dtype="fp32"),
    "fp16": Mode(dtype="fp16", trains_on_cpu=False),
    "torch_autocast": Mode(
        config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        dtype="fp32",
    ),
    "persistence thresholds": Mode(
        {"stage3_param_persistence_threshold": 2000, "stage3_model_persistence_threshold": 4000}
    ),
    "no persistence": Mode({"stage3_param_persistence_threshold": 0}),
    "offload_param cpu": Mode({"offload_param": {"device": "cpu", "pin_memory": False}}),
    "offload_param cpu pinned": Mode({"offload_param": {"device": "cpu", "pin_memory": True}}),
    "offload_param nvme": Mode({"offload_param": _nvme(**_BUFFERS)}),
    "offload_optimizer cpu": Mode({"offload_optimizer": {"device": "cpu", "pin_memory": False}}),
    "offload_optimizer nvme": Mode({"offload_optimizer": _nvme(), "sub_group_size": 5_000_000}),
    "offload both cpu": Mode(
        {
            "offload_param": {"device": "cpu", "pin_memory": False},
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        }
    ),
    "offload both nvme": Mode(
        {"offload_param": _nvme(**_BUFFERS), "offload_optimizer": _nvme(), "sub_group_size": 5_000_000}
    ),
    "zero_hpz_partition_size": Mode({"zero_hpz_partition_size": 2}, num_ranks=4),
    "zero_hpz_partition_size, offload_param cpu": Mode(
        {"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu", "pin_memory": False}}, num_ranks=4
    ),
    "stage3_use_all_reduce_for_fetch_params": Mode({"stage3_use_all_reduce_for_fetch_params": True}),
    "memory_efficient_linear off": Mode({"memory_efficient_linear": False}),
    "override_module_apply off": Mode({"override_module_apply": False}),
    "keep_in_fp32_modules": Mode(
        config={"data_types": {"keep_in_fp32_modules": ["rotary_emb"]}},
    ),
    "zero_quantized_weights": Mode({"zero_quantized_weights": True}, needs_gpu="its quantizer is a CUDA kernel"),
    "zero_quantized_nontrainable_weights": Mode(
        {"zero_quantized_nontrainable_weights": True}, needs_gpu="its quantizer is a CUDA kernel"
    ),
}


def ds_config(mode: Mode, swap: str) -> dict[str, Any]:
    """Return the ds_config of a mode, with `swap` as folder of its swap files."""
    precision = {"bf16": {"enabled": mode.dtype == "bf16"}, "fp16": {"enabled": mode.dtype == "fp16"}}
    # The default bucket of 5e8 elements is larger than the models; it is allocated by training only.
    zero = {"stage": 3, "reduce_bucket_size": 50_000_000, **mode.zero}
    config = {"train_micro_batch_size_per_gpu": 1, **precision, "zero_optimization": zero, **mode.config}
    replaced: dict[str, Any] = json.loads(json.dumps(config).replace("{swap}", swap))
    return replaced
