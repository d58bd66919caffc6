"""Digests of models, however many ranks hold them and however."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_load.errors import RankError
from tests import builders
from tests.multi_rank.test_modes import is_compiled
from tests.ranks import run_ranks

FP32 = {"zero_optimization": {"stage": 3}}


def stage_3(**zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **zero}}


def nvme(folder: str) -> dict[str, Any]:
    offload = {"device": "nvme", "nvme_path": folder, "buffer_size": 1_400_000, "pin_memory": False, "buffer_count": 4}
    return stage_3(offload_param=offload)


# -- model_digest ----------------------------------------------------------------------------------------------------


def digest_all(llama: str, tied: str, large: str, swap: str | None) -> dict[str, Any]:
    """Rank function: digests of one checkpoint loaded in many ways; returns each by what it was loaded as."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    from lowmem_load import DistributedInterface, load_model, model_digest

    group = DistributedInterface()
    ways: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "stage 3": (llama, FP32, {}),
        "stage 0": (llama, {"zero_optimization": {"stage": 0}}, {}),
        "stage 2": (llama, {"zero_optimization": {"stage": 2}}, {}),
        "cpu": (llama, stage_3(offload_param={"device": "cpu", "pin_memory": False}), {}),
        "partial": (llama, FP32, {"partition": ["model.layers"], "dtype": torch.float32}),
        "bf16": (llama, {**FP32, "bf16": {"enabled": True}}, {}),
        "tied": (tied, FP32, {}),
    }
    if group.world_size != 2:  # the rest is the same for any number of ranks
        ways = {way: ways[way] for way in ("stage 3", "partial", "tied")}
    if group.world_size == 4:
        ways["hpZ"] = (llama, stage_3(zero_hpz_partition_size=2), {})
    if swap is not None:
        ways["nvme"] = (large, nvme(f"{swap}/{group.world_size}"), {})
    found: dict[str, Any] = {}
    for way, (path, config, kwargs) in ways.items():
        model = load_model(path, config, **kwargs)
        found[way] = model_digest(model)
        assert model_digest(model) == found[way], way
        if way == "nvme":
            assert any(parameter.ds_tensor.final_location is not None for parameter in model.parameters())
        del model
        gc.collect()
    model = load_model(llama, {**FP32, "train_micro_batch_size_per_gpu": 1})
    found["bits"] = flip_each(model, group.rank, group.world_size)
    config = {
        **FP32,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    found["engine"] = model_digest(engine)
    tokens = torch.arange(8).view(1, 8) % 100
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    found["trained"] = model_digest(engine)
    found["large"] = model_digest(AutoModelForCausalLM.from_pretrained(large, dtype=torch.float32))
    return found


def flip_each(model: Any, rank: int, world_size: int) -> list[str]:
    """Flips a bit on each rank in turn, and back; returns what differs each time."""
    from lowmem_load import model_digest

    before, found = model_digest(model), []
    flipped = model.model.embed_tokens.weight.ds_tensor.view(torch.int32)
    for chosen in range(world_size):
        for _ in range(2):
            if rank == chosen:
                flipped[-40] ^= 1
            found += differing(before, model_digest(model))
    return found


def differing(first: dict[str, str], second: dict[str, str]) -> list[str]:
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


def ordinary(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    from lowmem_load import model_digest

    return model_digest(AutoModelForCausalLM.from_pretrained(path, dtype=dtype))


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(1, marks=pytest.mark.release),
        pytest.param(2, marks=pytest.mark.release),
        3,
        pytest.param(4, marks=pytest.mark.release),
    ],
)
def test_the_digest_is_that_of_an_ordinary_load(checkpoints: Path, tmp_path: Path, world_size: int) -> None:
    llama = builders.tiny_llama(checkpoints, torch.float32, **builders.ODD_SIZES)
    tied = builders.tiny_qwen2_tied(checkpoints, torch.float32, **builders.ODD_SIZES)
    large = builders.tiny_llama(checkpoints, torch.float32, vocab_size=40_000, num_hidden_layers=1)
    # DeepSpeed swaps partitions from 1 MiB on.
    swap = str(tmp_path) if is_compiled("async_io") and world_size <= 2 else None
    answers = run_ranks(digest_all, str(llama), str(tied), str(large), swap, world_size=world_size, timeout_s=180)
    assert all(answer == answers[0] for answer in answers)
    (found, *_) = answers
    whole = ordinary(llama, torch.float32)
    equal = {"stage 3", "stage 0", "stage 2", "cpu", "partial", "engine", "hpZ"} & set(found)
    assert len(equal) == {1: 3, 2: 6, 3: 3, 4: 4}[world_size]
    for way in equal:
        assert found[way] == whole, way
    if "bf16" in found:
        assert found["bf16"] == ordinary(llama, torch.bfloat16) != whole
    assert found["tied"] == ordinary(tied, torch.float32)
    assert "lm_head.weight" in whole and "lm_head.weight" not in found["tied"]
    assert found["bits"] == ["model.embed_tokens.weight"] * world_size
    assert differing(found["trained"], whole) == sorted(whole)
    if swap is not None:
        assert found["nvme"] == found["large"]


def digest_many() -> None:
    """Rank function: more tensors than one message to the store can have the sums of."""
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    from lowmem_load import DistributedInterface, model_digest
    from lowmem_load.saving import model_digest as module

    class Part(module._Part):  # summing up so many tensors takes minutes
        def take(self, _: module.Keys) -> None:
            self.sums = (int(self.names[0]) + (1 << 63),) * module.LANES

    sharded = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (DistributedInterface().world_size,)))
    module._Part = Part
    module._distinct = lambda _: (([str(number)], sharded) for number in range(120_000))
    found = model_digest(nn.Module())
    assert len(set(found.values())) == len(found) == 120_000
    for number in (0, 49_151, 49_152, 119_999):
        part = Part([str(number)], sharded)
        part.sums = (2 * number,) * module.LANES  # modulo 2**64
        assert found[str(number)] == part.hexdigest()


def test_models_of_any_number_of_tensors_are_digested() -> None:
    run_ranks(digest_many, timeout_s=180)


def refuse_digest(path: str) -> str:
    """Rank function: one rank's partition cannot be read."""
    from lowmem_load import load_model, model_digest
    from lowmem_load.ds import parameters

    model = load_model(path, FP32)
    if os.environ["RANK"] == "1":

        def broken(*_: Any) -> Any:
            raise OSError("no")

        parameters.partition_in_memory = broken
    with pytest.raises(RankError, match="digesting the model failed on 1 rank") as caught:
        model_digest(model)
    return str(caught.value)


def test_a_rank_that_cannot_digest_stops_all(checkpoints: Path) -> None:
    first, second = run_ranks(refuse_digest, str(builders.tiny_llama(checkpoints)))
    assert first == second and "rank 1: OSError: no" in first
