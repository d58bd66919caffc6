"""An ordinary load, stock ZeRO-3's and ours of a few tiny models, in the environment that runs this, on 2 ranks.

`python -m tests.compat.compare FILE` writes who differs from the ordinary load, and in what: parameters, buffers, the
names that are saved, the losses of five bf16 training steps. Each way to load has processes of its own, since DeepSpeed
replaces functions of torch when zero.Init is first entered.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks, set_environment

set_environment()

import torch  # noqa: E402

from tests import builders  # noqa: E402

MODELS: dict[str, tuple[Callable[..., Path], str]] = {
    "Llama": (functools.partial(builders.tiny_llama, head_dim=64), "AutoModelForCausalLM"),
    "Qwen2": (builders.tiny_qwen2_tied, "AutoModelForCausalLM"),
    "Mixtral": (builders.tiny_mixtral, "AutoModelForCausalLM"),
    "GPT-2": (builders.tiny_gpt2, "AutoModelForCausalLM"),
    "BERT": (builders.tiny_bert, "AutoModelForMaskedLM"),
}
WAYS = ("ordinary", "stock", "ours")
STEPS = 5
CONFIG = {
    # The default bucket of 5e8 elements is larger than the models, and takes seconds to allocate.
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 100_000,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": 1,
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}


def measure(way: str, paths: dict[str, str], folder: str) -> dict[str, dict[str, Any]]:
    """Rank function: what each model is after a load, after an engine has saved it, and its losses on this rank."""
    import deepspeed

    from lowmem_load import DistributedInterface

    rank = DistributedInterface().rank
    found = {}
    for name, path in paths.items():
        model, alive = _load(way, path, MODELS[name][1])
        buffers = {key: _digest(buffer) for key, buffer in model.named_buffers()}
        torch.manual_seed(0)
        engine, *_ = deepspeed.initialize(model=model.train(), config={**CONFIG, "optimizer": OPTIMIZER})
        saved, parameters = _saved(engine, f"{folder}/{way}/{name}", rank)
        losses = _losses(engine, rank)
        found[name] = {"parameters": parameters, "buffers": buffers, "saved names": saved, "losses": losses}
        engine.destroy()
        del engine, model, alive
    return found


def _load(way: str, path: str, auto_class: str) -> tuple[Any, Any]:
    """Returns the model, and what has to stay alive with it."""
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    from lowmem_load import load_model

    if way == "ours":
        return load_model(path, CONFIG, auto_class=auto_class), None
    alive = HfDeepSpeedConfig(CONFIG) if way == "stock" else None
    return getattr(transformers, auto_class).from_pretrained(path, dtype=torch.bfloat16), alive


def _saved(engine: Any, out: str, rank: int) -> tuple[list[str], dict[str, str]]:
    """Returns the names in the files that save_pretrained writes, and digests of all whole parameters."""
    from safetensors import safe_open

    state = engine._zero3_consolidated_16bit_state_dict()
    names: list[str] = []
    parameters: dict[str, str] = {}
    if rank == 0:
        model = engine.module
        parameters = {key: _digest(state[key]) for key, _ in model.named_parameters(remove_duplicate=False)}
        model.save_pretrained(out, state_dict=state)
        for file in sorted(Path(out).glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                names += opened.keys()
    return sorted(names), parameters


def _losses(engine: Any, rank: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(2 * step + rank))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def differences(ordinary: dict[str, Any], other: dict[str, Any]) -> dict[str, list[str]]:
    """Returns what of a model differs from its ordinary load, by topic; empty where nothing does.

    In names * stands for the number of a layer.
    """
    found = {}
    for topic in ("parameters", "buffers"):
        left, right = ordinary[topic], other[topic]
        found[topic] = _without_layers(
            f"{name}: {_told(right.get(name), left.get(name))}"
            for name in left.keys() | right.keys()
            if left.get(name) != right.get(name)
        )
    left, right = set(ordinary["saved names"]), set(other["saved names"])
    found["saved names"] = _without_layers(
        f"{name}: {_told('' if name in right else None, '' if name in left else None)}" for name in left ^ right
    )
    pairs = zip(ordinary["losses"], other["losses"], strict=True)
    first = next((f"{right!r} instead of {left!r}" for left, right in pairs if left != right), None)
    found["losses"] = [first] if first else []
    return {topic: entries for topic, entries in found.items() if entries}


def _without_layers(entries: Iterable[str]) -> list[str]:
    return sorted({re.sub(r"\.\d+\.", ".*.", entry) for entry in entries})


def _told(value: str | None, expected: str | None) -> str:
    """Returns how two digests differ: in the dtype, or in values alone."""
    if value is None or expected is None:
        return "is missing" if value is None else "is added"
    dtype, wanted = value.split()[0], expected.split()[0]
    return "other values" if dtype == wanted else f"{dtype} instead of {wanted}"


def compare() -> dict[str, dict[str, dict[str, list[str]]]]:
    """Returns differences by model and way, those of all ranks; "stock and ours" compares their losses."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: str(build(Path(folder), torch.bfloat16)) for name, (build, _) in MODELS.items()}
        measured = {way: run_ranks(measure, way, paths, folder, timeout_s=600) for way in WAYS}
    found: dict[str, Any] = {}
    for name in MODELS:
        of_ranks = {way: [rank[name] for rank in measured[way]] for way in WAYS}
        found[name] = {way: _of_all(of_ranks["ordinary"], of_ranks[way]) for way in WAYS[1:]}
        found[name]["ours to stock"] = _of_all(of_ranks["stock"], of_ranks["ours"])
    return found


def _of_all(left: list[Any], right: list[Any]) -> dict[str, list[str]]:
    merged: dict[str, list[str]] = {}
    for one, other in zip(left, right, strict=True):
        for topic, entries in differences(one, other).items():
            merged.setdefault(topic, [])
            merged[topic] += [entry for entry in entries if entry not in merged[topic]]
    return merged


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(compare()))
