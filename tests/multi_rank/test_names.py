"""Random modules whose children have the names that wrappers, trainers and optimizers use: no tensor is lost or renamed
without a word by a save, `iter_weights`, a load or `consolidate`."""

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from lowmem_load import consolidate, iter_weights, load_into, save_model
from lowmem_load.errors import LowMemLoadError
from tests.ranks import run_ranks

NUM_MODULES = 16

CHILDREN = (
    *("_orig_mod", "_checkpoint_wrapped_module", "base_layer", "original_module", "modules_to_save", "lora_A"),
    *("scaler", "state", "loader", "progress", "trainer", "optimizer", "scheduler", "rng", "optim_state", "exp_avg"),
    *("module", "model", "wrapped", "base_model", "adapter", "default", "policy", "ema", "encoder", "0", "Größe"),
)
TENSORS = ("weight", "bias", "scale", "state", "step", "lora_B", "_extra")
LEAVES: tuple[Callable[[], nn.Module], ...] = (
    lambda: nn.Linear(3, 2),
    lambda: nn.Embedding(4, 2),
    lambda: nn.BatchNorm1d(2),
    lambda: nn.LayerNorm(2),
)


class Node(nn.Module):
    """Has tensors and children of any names."""


def build(seed: int, *, wraps: bool) -> nn.Module:
    """Return a module; with `wraps` some parts of it are wrapped, which changes neither its tensors nor their order."""
    drawn = random.Random(seed)
    # Most of a word in each module: names that collide without a wrapper must be frequent.
    words = drawn.sample(CHILDREN, 4)

    def wrapped(module: nn.Module) -> nn.Module:
        kind = drawn.random()
        if not wraps or kind > 0.3:
            return module
        return checkpoint_wrapper(module) if kind > 0.15 else torch.compile(module, backend="eager")

    def node(depth: int) -> nn.Module:
        if depth == 0 or drawn.random() < 0.2:
            return drawn.choice(LEAVES)()
        made: nn.Module = nn.ModuleDict() if drawn.random() < 0.2 else Node()
        if isinstance(made, Node):
            for name in drawn.sample(sorted({*TENSORS}.difference(words)), drawn.choice((0, 1, 2))):
                made.register_parameter(name, nn.Parameter(torch.empty(2)))
        for name in drawn.sample(words, drawn.choice((1, 2, 3))):
            made.add_module(name, wrapped(node(depth - 1)))
        return made

    root = Node()
    for name in drawn.sample(words, drawn.choice((1, 2, 3))):
        root.add_module(name, wrapped(node(2)))
    return root


def filled(model: nn.Module) -> nn.Module:
    for number, tensor in enumerate((*model.parameters(), *model.buffers())):
        tensor.data.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 100 * number)
    return model


def differences(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> str:
    names = sorted(found.keys() ^ wanted.keys())
    return ", ".join(names or [name for name in wanted if not torch.equal(found[name], wanted[name])])


def sharded(seed: int, *, has_values: bool) -> nn.Module:
    if has_values:
        model = filled(build(seed, wraps=True))
        fully_shard(model)
        return model
    with torch.device("meta"):
        model = build(seed, wraps=True)
    fully_shard(model)
    return model.to_empty(device="cpu")


def by_save(seed: int, wanted: dict[str, torch.Tensor], folder: Path) -> str:
    save_model(sharded(seed, has_values=True), folder / "out")
    return differences(load_file(folder / "out" / "model.safetensors"), wanted)


def by_iter(seed: int, wanted: dict[str, torch.Tensor], _: Path) -> str:
    buckets = list(map(list, iter_weights(sharded(seed, has_values=True))))
    return differences({name: tensor for bucket in buckets for name, tensor in bucket}, wanted)


def by_load(seed: int, wanted: dict[str, torch.Tensor], folder: Path) -> str:
    save_file(wanted, folder / "in.safetensors")
    model, right = sharded(seed, has_values=False), build(seed, wraps=False)
    load_into(model, folder / "in.safetensors")
    names = dict(right.named_parameters()) | dict(right.named_buffers())
    found = [*(p.full_tensor() for p in model.parameters()), *model.buffers()]
    return differences(dict(zip(names, found, strict=True)), wanted)


def consolidated(state: dict[str, Any], weights: Mapping[str, torch.Tensor], folder: Path) -> str:
    """Without a configuration the names are those of the checkpoint, but for what all of them begin with."""
    dcp.save(state, checkpoint_id=str(folder / "dcp"), no_dist=True)
    report = consolidate(folder / "dcp", folder / "out", config=False)
    found = {name: value for file in (folder / "out").rglob("*.safetensors") for name, value in load_file(file).items()}
    removed = re.search(r"; (\S+) was removed from all names", report.source)
    return differences({(removed[1] if removed else "") + name: value for name, value in found.items()}, weights)


def by_flat(seed: int, _: dict[str, torch.Tensor], folder: Path) -> str:
    weights = filled(build(seed, wraps=True)).state_dict()
    return consolidated(dict(weights), weights, folder)


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: value.detach() for name, value in state.items() if isinstance(value, nn.Parameter)}


def by_nested_with_optimizer(seed: int, _: dict[str, torch.Tensor], folder: Path) -> str:
    model = filled(build(seed, wraps=True))
    moments = {name: {"exp_avg": value, "step": torch.ones(())} for name, value in trained(model).items()}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.1, "params": list(moments)}]}
    return consolidated({"model": model.state_dict(), "optimizer": optimizer}, model.state_dict(), folder)


def by_flat_with_optimizer(seed: int, _: dict[str, torch.Tensor], folder: Path) -> str:
    """As torch's `flatten_optimizer_state_dict` names them."""
    model = filled(build(seed, wraps=True))
    flat = {f"state.{name}.exp_avg": value for name, value in trained(model).items()}
    flat |= {f"param_groups.{name}.lr": torch.ones(()) for name in trained(model)}
    return consolidated({**model.state_dict(), **flat}, model.state_dict(), folder)


WAYS = (by_save, by_iter, by_load, by_flat, by_nested_with_optimizer, by_flat_with_optimizer)


def try_all(folder: str) -> list[tuple[str, str]]:
    """Rank function; return the cases that are not right, with what is wrong, or the error."""
    dist.init_process_group("gloo")
    failed: list[tuple[str, str]] = []
    for seed in range(NUM_MODULES):
        wanted = {name: value.clone() for name, value in filled(build(seed, wraps=False)).state_dict().items()}
        for way in WAYS:
            place = Path(folder) / f"{seed}_{way.__name__}"
            place.mkdir()
            try:
                if wrong := way(seed, wanted, place):
                    failed.append((f"{way.__name__} {seed}", f"SILENT {wrong}"))
            except LowMemLoadError as error:
                failed.append((f"{way.__name__} {seed}", f"{type(error).__name__}: {error}"))
    return failed


def test_no_tensor_is_lost_or_renamed_without_a_word(tmp_path: Path) -> None:
    (failed,) = run_ranks(try_all, str(tmp_path), world_size=1, timeout_s=400)
    silent = [case for case in failed if case[1].startswith("SILENT")]
    assert not silent, silent[:8]
    assert len(WAYS) * NUM_MODULES - len(failed) >= 85, Counter(error.partition(":")[0] for _, error in failed)
