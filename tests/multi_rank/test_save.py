"""save_model: what all ranks write together is what `save_pretrained` of the whole model writes, file by file."""

import contextlib
import gc
import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from lowmem_load import load_model, save_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import ConfigError, RankError, UnsupportedError
from lowmem_load.integrations.install import streaming
from lowmem_load.weights_out import folder as folders
from lowmem_load.weights_out import save, weight_files
from tests import builders
from tests.model_digest import model_digest
from tests.multi_rank.test_modes import is_compiled
from tests.ranks import RankFailure, run_ranks
from tests.storage import PageCache, on_network

SHARD = "30KB"
FP32: dict[str, Any] = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
BF16: dict[str, Any] = {**FP32, "bf16": {"enabled": True}}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
NETWORK = ("all_gather_into_tensor", "all_gather", "all_gather_object", "all_reduce", "broadcast", "send", "recv")


def stage_3(**zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **zero}}


@contextlib.contextmanager
def counted(names: Sequence[str]) -> Iterator[list[str]]:
    """Yields the names of these collectives of torch's that run meanwhile."""
    found: list[str] = []
    before = {name: getattr(dist, name) for name in names}

    def count(name: str, *args: Any, **kwargs: Any) -> Any:
        found.append(name)
        return before[name](*args, **kwargs)

    for name in before:
        setattr(dist, name, lambda *args, name=name, **kwargs: count(name, *args, **kwargs))
    try:
        yield found
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def ways(paths: dict[str, str], swap: str | None) -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return how each folder is made: checkpoint, ds_config, keywords of the load."""
    found: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {}
    for name in paths:
        found[f"{name}-fp32"] = (name, FP32, {})
        found[f"{name}-bf16"] = (name, BF16, {})
    cpu = stage_3(offload_param={"device": "cpu", "pin_memory": False})
    found["llama-cpu-fp32"] = ("llama", cpu, {})
    found["llama-2-fp32"] = ("llama", {"zero_optimization": {"stage": 2}}, {})
    found["llama-partial-fp32"] = ("llama", FP32, {"partition": ["model.layers"], "dtype": torch.float32})
    found["llama-hpz-fp32"] = ("llama", stage_3(zero_hpz_partition_size=2), {})
    if swap is not None:
        offload = {"device": "nvme", "nvme_path": swap, "buffer_size": 1_400_000, "pin_memory": False}
        found["large-nvme-fp32"] = ("large", stage_3(offload_param={**offload, "buffer_count": 4}), {})
    return found


def save_all(paths: dict[str, str], out: str, swap: str | None) -> dict[str, Any]:
    """Rank function: saves each checkpoint as loaded in many ways; returns what the reports say."""
    world_size = DistributedInterface().world_size
    chosen = ways(paths, swap)
    if world_size != 2:  # the rest is the same for any number of ranks
        chosen = {way: chosen[way] for way in chosen if way.removesuffix("-fp32") in paths}
    reports: dict[str, Any] = {}
    for way, (name, config, kwargs) in chosen.items():
        model = load_model(paths[name], config, **kwargs)
        sizes = {"mixtral-fp32": (SHARD, "5GB"), "minilm-fp32": ("20MB",)}
        for size in sizes.get(way, (SHARD,)):
            with counted(NETWORK) as collectives:
                report = save_model(model, f"{out}/{way}-{size}", max_shard_size=size)
            assert not collectives, way
        reports[way] = report
        if way in ("mixtral-fp32", "tied-bf16", "large-nvme-fp32"):
            again = load_model(f"{out}/{way}-{SHARD}", config if "nvme" not in way else FP32)
            assert model_digest(again) == model_digest(model)
            del again
        if way == "llama-fp32":
            report = save_model(model, f"{out}/cast-{SHARD}", max_shard_size=SHARD, dtype=torch.float16)
            assert report.staged_bytes == report.written_bytes
        del model
        gc.collect()
    if world_size == 2:
        save_merged({name: paths[name] for name in ("odd", "llama", "gpt2", "tied", "mixtral")}, out)
        save_trained(paths["llama"], out)
        fail_together(paths["llama"], out)
        save_by_two_paths(paths["llama"], out)
        save_from_two_nodes(paths["odd"], out)
    return {way: (report.written_bytes, report.staged_bytes, report.files) for way, report in reports.items()}


def save_trained(path: str, out: str) -> None:
    """Train a model of which part is frozen, and save it in both precisions."""
    model = load_model(path, BF16)
    model.model.embed_tokens.weight.requires_grad = False
    engine = deepspeed.initialize(model=model, config={**BF16, **ADAM})[0]
    tokens = torch.arange(8).view(1, 8) % 100
    for _ in range(2):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    masters = {name: safe_get_full_fp32_param(p) for name, p in model.named_parameters() if p.requires_grad}
    report = save_model(engine, f"{out}/trained-fp32", dtype=torch.float32)
    assert report.num_masters == len(masters)
    saved = load_file(f"{out}/trained-fp32/model.safetensors")
    for name, value in masters.items():
        assert torch.equal(saved[name], value.cpu()), name
    assert any((saved[name].bfloat16().float() != saved[name]).any() for name in masters)
    report = save_model(engine, f"{out}/trained-bf16")
    assert (report.num_masters, report.staged_bytes) == (0, 0)
    assert model_digest(load_model(f"{out}/trained-bf16", BF16)) == model_digest(engine)


def adapted(name: str, model: Any) -> Any:
    """Return a model of PEFT with adapters that change all that they are on; the same on all ranks."""
    from peft import IA3Config, LoraConfig, get_peft_model

    configs = {
        "odd": LoraConfig(target_modules=["q_proj", "down_proj", "embed_tokens", "lm_head"], use_rslora=True),
        "llama": LoraConfig(target_modules=["q_proj", "up_proj"], use_dora=True),
        "gpt2": LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True),
        "tied": LoraConfig(target_modules=["q_proj", "embed_tokens"]),
        "untied": LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "mixtral": IA3Config(target_modules=["q_proj"], feedforward_modules=[], init_ia3_weights=False),
    }
    config = configs[name]
    config.init_lora_weights, config.r = False, 4
    torch.manual_seed(7)
    return get_peft_model(model, config)


def save_merged(paths: dict[str, str], out: str) -> None:
    """Save models with adapters merged: partitioned adapters and whole ones."""
    for name, path in {**paths, "untied": paths["tied"]}.items():
        config = BF16 if name == "llama" else FP32
        with streaming(config):  # in which PEFT gathers what it looks into
            model = adapted(name, load_model(path, config))
        holder = deepspeed.initialize(model=model, config={**config, **ADAM})[0] if name in ("odd", "untied") else model
        before = list(model.state_dict()), list(map(id, model.modules())), model.config.tie_word_embeddings
        report = save_model(holder, f"{out}/merged-{name}", max_shard_size=SHARD, merge_adapters=True)
        assert before == (list(model.state_dict()), list(map(id, model.modules())), model.config.tie_word_embeddings)
        assert report.num_merged == {"odd": 6, "llama": 4, "tied": 3}.get(name, 2), name
        save_model(holder, f"{out}/again-{name}")  # the adapters, as ever
    with streaming(FP32):
        model = adapted("gpt2", load_model(paths["gpt2"], FP32))
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).add_(int(os.environ["RANK"]))
    save_model(model, f"{out}/merged-gpt2", max_shard_size=SHARD, merge_adapters=True)  # those of rank 0 count
    with pytest.raises(ConfigError, match="GPT2LMHeadModel is not a PeftModel"):
        save_model(load_model(paths["gpt2"], FP32), f"{out}/merged-differing", merge_adapters=True)


def save_by_two_paths(path: str, out: str) -> None:
    """Rank 1 has the disk under another path, of which the system does not say that it is a link: a mount."""
    model, is_second = load_model(path, FP32), os.environ["RANK"] == "1"
    folder, mounted, disk = Path(out, "two-paths"), Path(out, "mounted"), Path(out, "mounted-disk")
    if not is_second:
        mounted.symlink_to("two-paths")
        disk.symlink_to(".")
    ordinary, os.path.realpath = os.path.realpath, os.path.abspath
    try:
        for other in (disk / "two-paths", mounted):  # at first it is new
            save_model(model, other if is_second else folder)
            assert model_digest(load_model(str(folder), FP32)) == model_digest(model)
        with pytest.raises(RankError, match=r"rank 1: ConfigError: .*another: .* looked for .*name the same folder"):
            save_model(model, Path(out, "another") if is_second else folder)
    finally:
        os.path.realpath = ordinary
    torch.distributed.barrier()  # rank 0 removes its folder when the save has failed on all
    assert sorted(os.listdir(folder)) == ["config.json", "generation_config.json", "model.safetensors"]
    assert not os.path.lexists(Path(out, "another")) and not [name for name in os.listdir(out) if name[0] == "."]


def save_from_two_nodes(path: str, out: str) -> None:
    """Each rank is a node, and the folder is on NFS, of which each node has all pages in its cache."""

    class Node(PageCache):
        def fsync(self, descriptor: int) -> None:
            torch.distributed.barrier()  # no node has the bytes of another one in its pages
            super().fsync(descriptor)

    class Cached:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def open(self, path: Any, flags: int) -> int:
            assert not flags & os.O_DIRECT
            return os.open(path, flags)

    model, rank = load_model(path, FP32), int(os.environ["RANK"])
    for name, node, system in (("one-node", "one", Cached()), ("two-nodes", f"node {rank}", Node())):
        with (
            on_network(),
            mock.patch.object(save, "node_name", return_value=node),
            mock.patch.object(weight_files, "os", system),
        ):
            save_model(model, f"{out}/{name}")
    if rank == 0:
        AutoModelForCausalLM.from_pretrained(path).save_pretrained(f"{out}/ordinary")
        for name in ("one-node", "two-nodes"):
            equal_folders(Path(out, name), Path(out, "ordinary"))


def fail_together(path: str, out: str) -> None:
    """Rank 1 fails in several ways: both raise, and what was there is there still."""
    model, rank = load_model(path, FP32), int(os.environ["RANK"])
    target, before = f"{out}/llama-bf16-{SHARD}", sorted(os.listdir(out))

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    ordinary = weight_files.os.pwrite
    if rank == 1:
        weight_files.os.pwrite = full  # type: ignore[assignment]
    with pytest.raises(RankError, match=r"rank 1: CheckpointError: .*No space left on device"):
        save_model(model, target)
    weight_files.os.pwrite = ordinary
    if rank == 1:
        folders.PROBE = "on another machine"
    with pytest.raises(RankError, match=r"rank 1: ConfigError: .*does not see the folder that rank 0 made"):
        save_model(model, target)
    folders.PROBE = ".lowmem_load_probe"
    with pytest.raises(RankError, match=r"rank 1: has max_shard_size '31KB', where rank\(s\) 0 have '30KB'"):
        save_model(model, target, max_shard_size=f"{30 + rank}KB")
    began_s = time.monotonic()
    with pytest.raises(RankError if rank == 0 else TypeError, match="NoneType"):
        save_model(model, target if rank == 0 else None)  # type: ignore[arg-type]
    assert time.monotonic() - began_s < 10, "rank 0 does not wait for rank 1"
    with pytest.raises(ConfigError, match="state_dict: not among the keywords"):
        save_model(model, target, state_dict={})
    for dtype in (torch.int8, torch.float8_e4m3fn, "float32"):
        with pytest.raises(ConfigError, match=r"dtype: .* would destroy the weights"):
            save_model(model, target, dtype=dtype)  # type: ignore[arg-type]
    with (
        zero.GatheredParameters([model.lm_head.weight, model.model.norm.weight], modifier_rank=0),
        pytest.raises(ConfigError, match=r"norm\.weight, .*: gathered by an open .*GatheredParameters\."),
    ):
        save_model(model, target)
    partition = model.lm_head.weight.ds_tensor
    ordinary_data, partition.data = partition.data, partition.data.to(torch.int8)  # as DeepSpeed keeps frozen ones
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight: is torch\.float32, .* are quantized, as torch\.int8"):
        save_model(model, target)
    partition.data = ordinary_data
    assert sorted(os.listdir(out)) == before


def equal_folders(ours: Path, ordinary: Path) -> None:
    names = [sorted(path.relative_to(folder) for path in folder.rglob("*")) for folder in (ours, ordinary)]
    assert names[0] == names[1]
    for name in names[0]:
        if (ours / name).is_file():
            assert (ours / name).read_bytes() == (ordinary / name).read_bytes(), name


@pytest.fixture(scope="module")
def paths(checkpoints: Path) -> dict[str, str]:
    made = {
        "llama": builders.tiny_llama(checkpoints, torch.float32),
        "odd": builders.tiny_llama(checkpoints, torch.float32, **builders.ODD_SIZES),
        "gpt2": builders.tiny_gpt2(checkpoints, torch.float32),
        "tied": builders.tiny_qwen2_tied(checkpoints, torch.float32),
        "mixtral": builders.tiny_mixtral(checkpoints, torch.float32),
        "bert": builders.tiny_bert(checkpoints, torch.float32, **builders.ODD_BERT_SIZES),
        "large": builders.tiny_llama(
            checkpoints, torch.float32, hidden_size=1024, intermediate_size=2048, num_hidden_layers=1, vocab_size=2560
        ),
    }
    return {name: str(path) for name, path in made.items()}


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(3, marks=pytest.mark.release)])
def test_folders_equal_those_of_the_whole_model(
    world_size: int, paths: dict[str, str], minilm: Path, tmp_path: Path
) -> None:
    """Byte for byte: weights, headers, index and configuration."""
    swap = str(tmp_path / "swap") if is_compiled("async_io") else None
    if world_size == 1:
        paths = {"minilm": str(minilm), "mixtral": paths["mixtral"]}
    if world_size == 3:
        paths = {name: path for name, path in paths.items() if name != "large"} | {"minilm": str(minilm)}
    out = tmp_path / "out"
    reports = run_ranks(save_all, paths, str(out), swap, world_size=world_size, timeout_s=240)
    for way in reports[0]:
        name, dtype = way.split("-")[0], torch.bfloat16 if way.endswith("bf16") else torch.float32
        cls = {"bert": AutoModelForMaskedLM, "minilm": AutoModel}.get(name, AutoModelForCausalLM)
        model = cls.from_pretrained(paths[name], dtype=dtype)
        for folder in out.glob(f"{way}-*"):
            ordinary = tmp_path / "ordinary" / folder.name
            model.save_pretrained(ordinary, max_shard_size=folder.name.split("-")[-1])
            equal_folders(folder, ordinary)
        if way == "llama-fp32" and world_size == 2:
            model.half().save_pretrained(tmp_path / "half", max_shard_size=SHARD)
            equal_folders(out / f"cast-{SHARD}", tmp_path / "half")
        written = [report[way] for report in reports]
        numel = sum(value.numel() for value in model.state_dict().values())
        assert sum(nbytes for nbytes, _, _ in written) <= numel * dtype.itemsize, "ties once"
        assert not any(staged for _, staged, _ in written), "straight from the partitions"
        whole = {"llama-2-fp32": 1.0, "llama-partial-fp32": 0.9}.get(way, 1 / world_size)
        assert max(nbytes for nbytes, _, _ in written) <= 1.1 * whole * sum(nbytes for nbytes, _, _ in written), way
    if world_size == 2:
        merged_as_peft_merges(paths, out, tmp_path)
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def merged_as_peft_merges(paths: dict[str, str], out: Path, tmp_path: Path) -> None:
    for folder in out.glob("merged-*"):
        name = folder.name.removeprefix("merged-")
        path, dtype = paths["tied" if name == "untied" else name], torch.bfloat16 if name == "llama" else torch.float32
        with warnings.catch_warnings():  # PEFT's, of ties
            warnings.simplefilter("ignore")
            model = adapted(name, AutoModelForCausalLM.from_pretrained(path).to(dtype)).merge_and_unload()
        model.to(dtype)  # PEFT 0.15 leaves DoRA's merged weights in fp32
        model.save_pretrained(tmp_path / folder.name, max_shard_size=SHARD)
        equal_folders(folder, tmp_path / folder.name)
        assert (out / f"again-{name}" / "adapter_model.safetensors").exists()


# -- a rank is killed ------------------------------------------------------------------------------------------------


def die_while_writing(path: str, target: str) -> None:
    """Rank function: rank 1 is killed when it has written half of what is its to write."""
    ordinary, count = weight_files.os.pwrite, [0]

    def counted(*args: Any) -> int:
        count[0] += 1
        if count[0] == 10 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return ordinary(*args)

    weight_files.os.pwrite = counted  # type: ignore[assignment]
    save_model(load_model(path, FP32), target, max_shard_size=SHARD)


def test_a_rank_that_is_killed_leaves_the_former_folder(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    before = AutoModelForCausalLM.from_pretrained(path)
    for parameter in before.parameters():
        parameter.data.mul_(2)
    before.save_pretrained(tmp_path / "model")
    with pytest.raises(RankFailure, match="rank 1"):
        run_ranks(die_while_writing, str(path), str(tmp_path / "model"))
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(found[name], value) for name, value in before.state_dict().items())
