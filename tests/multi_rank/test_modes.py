"""Every ZeRO-3 mode that CPU ranks can run: partitions, full parameters and losses of the default loader."""

import gc
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.utils import groups
from transformers import AutoModelForCausalLM

from lowmem_load import load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import ConfigError
from lowmem_load.text import size
from tests import builders
from tests.ranks import DEVICE, IS_SIMULATED, run_ranks

STEPS = 3
"""Of training. The third follows from an update, whose gradients followed from one."""

VOCAB_SIZE = 40_000
"""Makes partitions of over 1 MiB, which is the least that DeepSpeed swaps: for modes of nvme."""

SMALL = {"reduce_bucket_size": 100_000, "stage3_prefetch_bucket_size": 50_000}


@dataclass(frozen=True, slots=True)
class Mode:
    """A ds_config to load under: what it adds to zero_optimization and at top level, "{swap}" being a folder.

    Where `trains_on_cpu` is not set, only loads are compared.
    """

    zero: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bf16"
    num_ranks: int = 2
    trains_on_cpu: bool = True


def _nvme(**more: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": "{swap}", "pin_memory": False, "buffer_count": 8, **more}


_BUFFERS = {"buffer_size": 700_000}
MODES: dict[str, Mode] = {
    "bf16": Mode(),
    "fp32": Mode(dtype="fp32"),
    "fp16": Mode(dtype="fp16", trains_on_cpu=False),
    "torch_autocast": Mode(config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, dtype="fp32"),
    "persistence thresholds": Mode(
        {"stage3_param_persistence_threshold": 2000, "stage3_model_persistence_threshold": 4000}
    ),
    "no persistence": Mode({"stage3_param_persistence_threshold": 0}),
    "offload_param cpu": Mode({"offload_param": {"device": "cpu", "pin_memory": False}}),
    "offload_param cpu pinned": Mode({"offload_param": {"device": "cpu", "pin_memory": True}}),
    "offload_param nvme": Mode({"offload_param": _nvme(**_BUFFERS)}),
    "offload_optimizer cpu": Mode({"offload_optimizer": {"device": "cpu", "pin_memory": False}}),
    "offload_optimizer nvme": Mode({"offload_optimizer": _nvme()}),
    "offload both cpu": Mode(
        {
            "offload_param": {"device": "cpu", "pin_memory": False},
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
        }
    ),
    "offload both nvme": Mode({"offload_param": _nvme(**_BUFFERS), "offload_optimizer": _nvme()}),
    "zero_hpz_partition_size": Mode({"zero_hpz_partition_size": 2}, num_ranks=4),
    "zero_hpz_partition_size, offload_param cpu": Mode(
        {"zero_hpz_partition_size": 2, "offload_param": {"device": "cpu", "pin_memory": False}}, num_ranks=4
    ),
    "stage3_use_all_reduce_for_fetch_params": Mode({"stage3_use_all_reduce_for_fetch_params": True}),
    "memory_efficient_linear off": Mode({"memory_efficient_linear": False}),
    "override_module_apply off": Mode({"override_module_apply": False}),
    "keep_in_fp32_modules": Mode(config={"data_types": {"keep_in_fp32_modules": ["rotary_emb"]}}),
}


def small_config(mode: Mode, swap: str) -> dict[str, Any]:
    """Return the ds_config of a mode, with `swap` as folder of its swap files."""
    precision: dict[str, Any] = {dtype: {"enabled": mode.dtype == dtype} for dtype in ("bf16", "fp16")}
    precision["fp16"]["initial_scale_power"] = 8  # with the default, the first steps are skipped
    zero = {"stage": 3, **SMALL, **mode.zero}
    if "offload_optimizer" in zero:
        zero["sub_group_size"] = 20_000
    config = {"train_micro_batch_size_per_gpu": 1, **precision, "zero_optimization": zero, **mode.config}
    replaced: dict[str, Any] = json.loads(json.dumps(config).replace("{swap}", swap))
    return replaced


def compare_modes(small: str, large: str, names: list[str], folder: str) -> None:
    from benchmarks.methods import LOADERS, Job
    from benchmarks.train import training_losses
    from benchmarks.worker import digest_partitions

    group = DistributedInterface()
    gc.freeze()  # what is imported need not be looked through after each model
    for name in names:
        mode, path = MODES[name], large if "nvme" in name else small
        trains = mode.trains_on_cpu or os.environ.get(DEVICE) == "sim"
        digests, losses, persistent = {}, {}, {}
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # DeepSpeed cannot make a second hpZ model in one process
        for method in ("default", "lowmem"):
            config = small_config(mode, f"{folder}/{name}/{method}")
            loaded = LOADERS[method](Job(Path(path), mode.dtype, config, group.rank, group.world_size, group.device))
            swapped = any(p.ds_tensor.final_location is not None for p in loaded.model.parameters())
            digests[method] = digest_partitions(loaded, group.rank, group.world_size)
            losses[method] = training_losses(loaded.model, config, STEPS, group.rank) if trains else []
            sizes = [p.ds_numel for p in loaded.model.parameters() if p.ds_persist]
            persistent[method] = (len(sizes), sum(sizes))
            del loaded
            gc.collect()
        assert digests["lowmem"] == digests["default"], name
        assert losses["lowmem"] == losses["default"], name
        assert len(set(losses["lowmem"])) == (STEPS if trains else 0), name
        if trains:  # only an engine marks parameters as persistent
            assert persistent["lowmem"] == persistent["default"], name
        assert swapped is ("nvme" in name and name != "offload_optimizer nvme"), name


def extensions(name: str) -> tuple[str, ...]:
    """Returns which extensions of DeepSpeed a mode needs, besides shm_comm."""
    return (*(["async_io"] if "nvme" in name else []), *(["cpu_adam"] if "optimizer" in name or "both" in name else []))


def is_compiled(name: str) -> bool:
    """Compiling takes minutes, so `make setup` and `make compat` do that before the tests, where they can."""
    return Path(os.environ["TORCH_EXTENSIONS_DIR"], name, f"{name}.so").is_file()


def skip_unless_compiled(names: Iterable[str]) -> None:
    absent = [name for name in names if not is_compiled(name)]
    if absent:
        pytest.skip(f"DeepSpeed's {' and '.join(absent)} not compiled here")


def runs_here(name: str) -> bool:
    """On the simulated device two trainings by DeepSpeed alone from nvme differ."""
    return all(map(is_compiled, extensions(name))) and not (IS_SIMULATED and "nvme" in name)


PARTS = {
    *("offload_param cpu", "offload_optimizer cpu", "offload_param nvme", "offload_optimizer nvme", "no persistence"),
    *("bf16", "fp32", "override_module_apply off", "zero_hpz_partition_size, offload_param cpu"),
}
"""What another mode does as well: both offloads, or other thresholds. Plain precisions are in test_load_model.py."""


@pytest.mark.parametrize(
    ("num_ranks", "parts"),
    [(2, False), (4, False), *(pytest.param(ranks, True, marks=pytest.mark.release) for ranks in (2, 4))],
)
def test_modes_equal_the_default(checkpoints: Path, tmp_path: Path, num_ranks: int, parts: bool) -> None:
    names = [name for name, mode in MODES.items() if mode.num_ranks == num_ranks and (name in PARTS) is parts]
    chosen = [name for name in names if runs_here(name)]
    paths = [str(builders.tiny_llama(checkpoints)), str(builders.tiny_llama(checkpoints, vocab_size=VOCAB_SIZE))]
    run_ranks(compare_modes, *paths, chosen, str(tmp_path), world_size=num_ranks, timeout_s=900)
    if chosen != names:
        pytest.skip(f"the others passed; not compiled, or not for this device: {sorted({*names} - {*chosen})}")


def load_next_to_a_live_model(path: str, folder: str) -> None:
    """Rank function: what a second model may do to the first one's swap files, and a disk that is too full for both."""

    def config(**offload: Any) -> dict[str, Any]:
        offload = {"device": "nvme", "nvme_path": folder, "buffer_size": 700_000, "pin_memory": False, **offload}
        return {"zero_optimization": {"stage": 3, "offload_param": offload}}

    model = load_model(path, config())
    with pytest.raises(ConfigError, match="has the weights of another model"):
        load_model(path, config())
    with pytest.raises(ConfigError, match=r"offload_param\.buffer_size is 10 elements"):
        load_model(path, config(nvme_path=f"{folder}/other", buffer_size=10))

    DistributedInterface().barrier()
    swapped = sum(file.stat().st_size for file in Path(folder).glob("zero_stage_3/*/rank*/*.swp"))
    assert swapped > 2 << 20
    full = f"{folder}/full/zero_stage_3/float32params/rank0"
    message = rf"rank\(s\) 0-1 need {size(swapped)}, and .* are free \({full}\)"
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=swapped - 1))
        with pytest.raises(ConfigError, match=message):
            load_model(path, config(nvme_path=f"{folder}/full"))
        assert not list(Path(folder, "full").rglob("*.swp"))
        patches.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=swapped))
        load_model(path, config(nvme_path=f"{folder}/full"))
    del model
    assert torch.is_tensor(next(load_model(path, config()).parameters()))


def test_swap_files_of_a_live_model_are_safe(checkpoints: Path, tmp_path: Path) -> None:
    skip_unless_compiled(["async_io"])
    path = builders.tiny_llama(checkpoints, vocab_size=VOCAB_SIZE)
    run_ranks(load_next_to_a_live_model, str(path), str(tmp_path))


PARALLEL: dict[str, tuple[str, dict[str, Any], int]] = {
    "AutoTP": ("tiny_llama", {"tensor_parallel": {"autotp_size": 2}}, 2),
    "AutoEP": ("tiny_mixtral", {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}, 1),
}
"""The model's builder, the keys of the ds_config, and how many consecutive ranks get the same batches."""


def compare_parallel_layers(path: str, more: dict[str, Any], batch_ranks: int) -> None:
    """Rank function. The default is an ordinary load, because transformers refuses tensor_parallel under ZeRO-3."""
    from transformers.utils import output_capturing

    from benchmarks.train import training_losses

    # deepspeed 0.19.8 calls get(key, default) of what is a dict with another get in transformers 5.23.
    registry: Any = type(output_capturing._CAN_RECORD_REGISTRY)
    registry.get = lambda self, key, default=None: dict.get(
        self, key if isinstance(key, str) else str(type(key)), default or {}
    )
    rank = DistributedInterface().rank
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **SMALL}, **more}
    default = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    expected = training_losses(default, config, STEPS, rank // batch_ranks)
    losses = training_losses(load_model(path, config), config, STEPS, rank // batch_ranks)
    assert losses == expected
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("name", PARALLEL)
def test_tensor_and_expert_parallel_training_equals_the_default(checkpoints: Path, name: str) -> None:
    if name == "AutoEP" and IS_SIMULATED:
        pytest.skip("the simulated device's backend has no all-to-all")
    builder, more, batch_ranks = PARALLEL[name]
    path = getattr(builders, builder)(checkpoints)
    run_ranks(compare_parallel_layers, str(path), more, batch_ranks, world_size=4)
