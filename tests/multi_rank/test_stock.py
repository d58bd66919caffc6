"""What stock ZeRO-3 and a load here give of the same files: buffers, names that are saved, losses of training in bf16.

Each way to load has processes of its own, since DeepSpeed replaces functions of torch when zero.Init is first entered.
"""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from tests import builders
from tests.parity import ADAM, train
from tests.ranks import run_ranks

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
ROTARY = {"Llama", "Qwen2", "Mixtral"}
ROUNDS_ROTARY = Version("5.15.0") <= Version(Version(transformers.__version__).public) <= Version("5.22.2")
"""Whether stock computes rotary_emb.inv_freq in the dtype of the weights, with this transformers; others in float32."""


def measure(way: str, models: dict[str, tuple[str, str]], folder: str) -> dict[str, dict[str, Any]]:
    """Rank function: what each model is after a load, after an engine has saved it, and its losses on this rank."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    from lowmem_load import DistributedInterface, load_model

    rank = DistributedInterface().rank
    found = {}
    for name, (path, auto_class) in models.items():
        alive = HfDeepSpeedConfig(CONFIG) if way == "stock" else None
        if way == "ours":
            model = load_model(path, CONFIG, auto_class=auto_class)
        else:
            model = getattr(transformers, auto_class).from_pretrained(path, dtype=torch.bfloat16)
        buffers = {key: digest(buffer) for key, buffer in model.named_buffers()}
        torch.manual_seed(0)
        engine, *_ = deepspeed.initialize(model=model.train(), config={**CONFIG, **ADAM})
        parameters, names = saved(engine, Path(folder, way, name), rank)
        found[name] = {"parameters": parameters, "buffers": buffers, "names": names, "losses": train(engine, STEPS)}
        engine.destroy()
        del engine, model, alive
    return found


def saved(engine: Any, out: Path, rank: int) -> tuple[dict[str, str], list[str]]:
    """Returns all whole parameters, and the names in the files that save_pretrained writes; of rank 0 only."""
    from safetensors import safe_open

    state = engine._zero3_consolidated_16bit_state_dict()
    if rank:
        return {}, []
    model = engine.module
    parameters = {key: digest(state[key]) for key, _ in model.named_parameters(remove_duplicate=False)}
    model.save_pretrained(out, state_dict=state)
    names: list[str] = []
    for file in sorted(out.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names += opened.keys()
    return parameters, sorted(names)


def digest(tensor: torch.Tensor) -> str:
    """Returns its dtype and a digest of its bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """Returns the names whose digests differ, or that one alone has."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@pytest.mark.release
def test_a_load_is_that_of_stock_but_for_what_is_known(tmp_path: Path) -> None:
    of = torch.bfloat16
    models = {
        "Llama": (str(builders.tiny_llama(tmp_path, of, head_dim=64)), "AutoModelForCausalLM"),
        "Qwen2": (str(builders.tiny_qwen2_tied(tmp_path, of)), "AutoModelForCausalLM"),
        "Mixtral": (str(builders.tiny_mixtral(tmp_path, of)), "AutoModelForCausalLM"),
        "GPT-2": (str(builders.tiny_gpt2(tmp_path, of)), "AutoModelForCausalLM"),
        "BERT": (str(builders.tiny_bert(tmp_path, of)), "AutoModelForMaskedLM"),
    }
    ways = ("ordinary", "stock", "ours")
    measured = {way: run_ranks(measure, way, models, str(tmp_path), timeout_s=600) for way in ways}
    for ordinary, stock, ours in zip(*(measured[way] for way in ways), strict=True):
        for name in models:
            for topic in ("parameters", "buffers"):
                assert differing(ordinary[name][topic], ours[name][topic]) == set(), (name, topic)
            assert ordinary[name]["names"] == ours[name]["names"], name
            rounded = ROUNDS_ROTARY and name in ROTARY
            buffers = differing(stock[name]["buffers"], ours[name]["buffers"])
            assert {each.rpartition("rotary_emb.")[2] for each in buffers} <= {"inv_freq", "original_inv_freq"}
            assert bool(buffers) == rounded, (name, buffers)
            assert differing(stock[name]["parameters"], ours[name]["parameters"]) == set(), name
            if name == "BERT":  # stock saves LayerNorm.gamma and beta, too
                assert {each.rpartition(".")[2] for each in set(stock[name]["names"]) ^ set(ours[name]["names"])} <= {
                    *("gamma", "beta", "weight", "bias")
                }
            else:
                assert stock[name]["names"] == ours[name]["names"], name
            if not rounded:
                assert stock[name]["losses"] == ours[name]["losses"], name
