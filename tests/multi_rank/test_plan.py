"""plan() is the plan that a rank makes and executes, made in a plain process: no group, no DeepSpeed, headers only."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from lowmem_load import get_load_report, load_model, plan
from lowmem_load.load import load as stages
from lowmem_load.planning.load_plan import LoadPlan
from tests import builders
from tests.multi_rank.test_formats import with_fp8
from tests.parity import BF16, FP32
from tests.ranks import run_ranks

FP16 = {"zero_optimization": {"stage": 3}, "fp16": {"enabled": True}}

Case = tuple[str, dict[str, Any], dict[str, Any]]
"""Path, ds_config and keywords of a load."""


def stage_3(**zero: Any) -> dict[str, Any]:
    return {**BF16, "zero_optimization": {"stage": 3, **zero}}


def fp8(checkpoints: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    from transformers import FineGrainedFP8Config

    folder, options = with_fp8(checkpoints, tmp_path)
    fields = {key: value for key, value in options["quantization"].items() if key != "quant_method"}
    return folder, {"quantization_config": FineGrainedFP8Config(**fields)}


def tied_twice(checkpoints: Path, tmp_path: Path) -> Path:
    """A tied weight under both its names, which transformers compares."""
    folder = Path(shutil.copytree(builders.tiny_qwen2_tied(checkpoints), tmp_path / "tied"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def with_gaps(checkpoints: Path, tmp_path: Path) -> Path:
    """Tensors that were saved as views with gaps, of which only torch knows what they hold."""
    folder = Path(shutil.copytree(builders.as_torch_bin(builders.tiny_llama(checkpoints)), tmp_path / "gaps"))
    state = torch.load(folder / "pytorch_model.bin")
    for name in [name for name in state if "mlp" in name]:
        state[name] = torch.nn.functional.pad(state[name], (1, 2))[:, 1:-2]
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def cases(checkpoints: Path, tmp_path: Path, world_size: int) -> dict[str, Case]:
    llama, bert = builders.tiny_llama(checkpoints), builders.tiny_bert(checkpoints)
    odd = builders.tiny_llama(checkpoints, torch.float32, "20KB", **builders.ODD_SIZES)
    mixtral = builders.tiny_mixtral(checkpoints)
    llava = builders.tiny_llava(checkpoints)
    quantized, quantization = fp8(checkpoints, tmp_path)
    classifier = {"auto_class": "BertForSequenceClassification"}
    language = ["model.language_model", "lm_head"]
    found: dict[str, tuple[Path, dict[str, Any], dict[str, Any]]] = {
        "llama": (llama, BF16, {}),
        "llama, odd sizes, sharded": (odd, FP32, {}),
        "llama, cast to bf16": (odd, BF16, {}),
        "llama, cast to fp16": (odd, FP16, {"auto_class": "AutoModelForCausalLM"}),
        "qwen2, tied, both names": (tied_twice(checkpoints, tmp_path), BF16, {}),
        "mixtral, experts fused": (mixtral, BF16, {}),
        "mixtral, .bin": (builders.as_torch_bin(mixtral, 2), BF16, {}),
        ".bin with gaps": (with_gaps(checkpoints, tmp_path), FP32, {}),
        "bert, head missing, cast": (bert, BF16, classifier),
        "fp8, scaled by blocks": (quantized, BF16, quantization),
        "offloaded to the host": (llama, stage_3(offload_param={"device": "cpu"}), {}),
        "nothing kept whole": (llama, stage_3(stage3_param_persistence_threshold=0), {}),
        "auto": (llama, {**stage_3(reduce_bucket_size="auto"), "bf16": {"enabled": "auto"}}, {}),
        "partial": (llava, FP32, {"partition": language}),
        "partial, bf16 outside too": (llava, BF16, {"partition": language, "dtype": torch.bfloat16}),
        "stage 2, head missing": (bert, {"zero_optimization": {"stage": 2}}, classifier),
    }
    if world_size != 3:  # DeepSpeed wants a divisor
        found["hpZ"] = (odd, stage_3(zero_hpz_partition_size=2), {})
    return {name: (str(path), config, kwargs) for name, (path, config, kwargs) in found.items()}


def executed_plans(loads: dict[str, Case]) -> dict[str, LoadPlan]:
    """Rank function: the plans that loads executed, each of which read what its plan says."""
    executed: list[LoadPlan] = []
    ordinary = stages.execute

    def kept(planned: Any, *args: Any) -> None:
        executed.append(planned.plan)
        ordinary(planned, *args)

    found: dict[str, LoadPlan] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "execute", kept)
        for name, (path, config, kwargs) in loads.items():
            report = get_load_report(load_model(path, config, **kwargs))
            (found[name],) = executed
            executed.clear()
            of_plan = found[name]
            described = sum(nbytes for _, nbytes in of_plan.read_to_describe)
            assert report.read_bytes == of_plan.costs.read_bytes + described, name
            assert described or report.num_reads == of_plan.costs.num_reads, name
            assert report.needed_bytes == of_plan.costs.needed_bytes, name
            assert report.partition_bytes == of_plan.partition_bytes, name
            assert report.whole_bytes == of_plan.replicated_bytes + of_plan.companion_bytes, name
            assert report.slow_paths == of_plan.slow_paths, name
    return found


def differing(left: Any, right: Any, path: str = "plan") -> Iterator[str]:
    """Yields where two plans differ, the deepest fields that do."""
    if dataclasses.is_dataclass(left) and type(left) is type(right):
        for field in dataclasses.fields(left):
            if field.compare:
                yield from differing(getattr(left, field.name), getattr(right, field.name), f"{path}.{field.name}")
    elif isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from differing(one, other, f"{path}[{number}]")
    elif left != right:
        yield f"{path}: {left!r} executed, {right!r} planned"


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.release), 3])
def test_a_rank_executes_the_plan_that_any_process_makes(checkpoints: Path, tmp_path: Path, world_size: int) -> None:
    loads = cases(checkpoints, tmp_path, world_size)
    ranks = run_ranks(executed_plans, loads, world_size=world_size, timeout_s=300)
    assert not dist.is_initialized()
    for rank, executed in enumerate(ranks):
        if rank == 1 and world_size == 3:  # the first and the last have all that differs: no padding, and some
            continue
        for name, (path, config, kwargs) in loads.items():
            planned = plan(path, config, rank=rank, world_size=world_size, **kwargs)
            assert next(differing(executed[name], planned), None) is None, name
            assert executed[name] == planned, name
    fingerprints = {name: {executed[name].fingerprint for executed in ranks} for name in loads}
    assert all(len(each) == 1 for each in fingerprints.values())
