"""streaming() and load_model(): what they change, what they restore, what they refuse, and that training agrees."""

import json
import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BertForMaskedLM,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
)
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from lowmem_load import ConfigError, RankError, get_load_report, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.engines.parameters import is_partitioned, partition_of
from lowmem_load.integrations.install import streaming
from tests import builders
from tests.parity import BF16, FP32, differences, losses_of_engine
from tests.ranks import run_ranks


def global_state() -> tuple[Any, ...]:
    """What streaming() may change while it is active, but for functions that ask whether it is."""
    import transformers.integrations.deepspeed as integration
    import transformers.modeling_utils as modeling

    return (
        PreTrainedModel.tie_weights,
        "load_adapter" in vars(PreTrainedModel),
        integration.deepspeed_config(),
        modeling.is_deepspeed_zero3_enabled(),
        nn.Module.__init_subclass__,
        torch.empty,
        torch.Tensor.__new__,
    )


def functions() -> tuple[Any, ...]:
    """Functions that are replaced during a load."""
    import transformers.modeling_utils as modeling

    return modeling.safe_open, vars(PreTrainedModel)["from_pretrained"], PreTrainedModel.load_adapter


def stream_and_restore(llama: str, bert: str) -> None:
    """Loads in blocks, also one within another."""
    before = global_state(), functions()
    with streaming(BF16):
        assert is_deepspeed_zero3_enabled()
        auto = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
        exact, info = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16, output_loading_info=True)
        with streaming(FP32):
            inner = BertForMaskedLM.from_pretrained(bert)
        outer = AutoModel.from_pretrained(bert, dtype=torch.bfloat16)
    assert (global_state(), functions()) == before
    keys = {key: list(value) for key, value in info.items() if key.endswith("keys")}
    assert keys == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    dtypes = [get_load_report(model).contents.rpartition(", ")[2] for model in (auto, exact, inner, outer)]
    assert dtypes == ["bfloat16", "bfloat16", "float32", "bfloat16"]
    plain = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    assert not any(is_partitioned(parameter) for parameter in plain.parameters())
    for model in (auto, exact):
        assert differences(model, plain) == []
    with pytest.raises(KeyError, match="from the block"), streaming(BF16):
        raise KeyError("from the block")
    assert (global_state(), functions()) == before


def test_streaming_is_a_context(checkpoints: Path) -> None:
    run_ranks(
        stream_and_restore, str(builders.tiny_llama(checkpoints)), str(builders.tiny_bert(checkpoints)), timeout_s=120
    )


def compare_losses(path: str, ds_config: dict[str, Any], others: list[str]) -> None:
    ours = losses_of(path, ds_config, "ours")
    assert ours[-1] < ours[0]
    for how in others:
        assert losses_of(path, ds_config, how) == ours, how


def losses_of(path: str, ds_config: dict[str, Any], how: str) -> list[float]:
    """Loads in one of three ways and trains for some steps; returns the losses of this rank."""
    alive = HfDeepSpeedConfig(ds_config) if how == "default" else None
    if how == "ours":
        model = load_model(path, ds_config)
    else:
        dtype = torch.bfloat16 if "bf16" in ds_config else torch.float32
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    del alive
    return losses_of_engine(model, ds_config, 5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_follows_the_ordinary_and_the_default_load(checkpoints: Path, precision: str) -> None:
    if precision == "fp32":
        path = builders.tiny_llama(checkpoints, torch.float32, "20KB", **builders.ODD_SIZES)
    else:
        path = builders.tiny_qwen2_tied(checkpoints)
    config = FP32 if precision == "fp32" else BF16
    run_ranks(compare_losses, str(path), config, ["ordinary", "default"], timeout_s=120)


def refuse(cases: list[tuple[str, Any, dict[str, Any], str, str]]) -> None:
    """Rank function: the error of each load has the class name and a part of the text that are given."""
    for name, ds_config, kwargs, kind, text in cases:
        start = time.perf_counter()
        with pytest.raises(Exception, match=re.escape(text)) as caught:
            load_model(name, ds_config, **kwargs)
        assert caught.typename == kind, str(caught.value)
        assert time.perf_counter() - start < 10, "an error must come within seconds"


def test_bad_input_is_one_clear_error_on_every_rank(checkpoints: Path) -> None:
    """Unit tests of each module show what else is refused."""
    good = str(builders.tiny_llama(checkpoints))
    auto_bucket = {"zero_optimization": {"stage": 3, "sub_group_size": "auto"}, "train_micro_batch_size_per_gpu": 1}
    cases: list[tuple[str, Any, dict[str, Any], str, str]] = [
        (good, auto_bucket, {}, "ConfigError", "zero_optimization.sub_group_size"),
        (good, BF16, {"dtype": torch.float32}, "ConfigError", "contradicts the ds_config"),
        (good, BF16, {"dtype": "float31"}, "ConfigError", "is not a floating-point dtype of torch"),
        (good, BF16, {"quantization_config": {"quant_method": "gptq"}}, "UnsupportedError", "gptq"),
    ]
    run_ranks(refuse, cases)


def give_different_arguments(good: str, other: str) -> None:
    """Each call differs between the ranks in one thing."""
    first = os.environ["RANK"] == "0"
    calls: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("describing the model", good if first else other, BF16, {}),
        ("checking the arguments", good, BF16 if first else FP32, {}),
        ("checking the arguments", good, {**BF16, "zero_optimization": {"stage": 3 if first else 2}}, {}),
        ("planning", good, BF16, {"partition": "model" if first else ["model", "lm_head"]}),
        ("describing the model", good, BF16, {"partition": "model", "dtype": "float32" if first else "bfloat16"}),
    ]
    for step, path, config, kwargs in calls:
        with pytest.raises(RankError, match=step) as caught:
            load_model(path, config, **kwargs)
        assert "has " in str(caught.value)


def test_ranks_with_different_files_or_arguments_are_stopped(checkpoints: Path) -> None:
    good, other = builders.tiny_llama(checkpoints), builders.tiny_llama(checkpoints, vocab_size=130)
    run_ranks(give_different_arguments, str(good), str(other), timeout_s=120)


def load_corner_cases(llama: str, half: str) -> None:
    """Rank function: keywords and states that are easily lost on the way."""
    rank = DistributedInterface().rank
    torch.manual_seed(42)
    with streaming(FP32):
        LlamaForSequenceClassification.from_pretrained(llama, dtype=torch.float32)  # draws random numbers for its head
    after_ours = torch.rand(1).item()
    torch.manual_seed(42)
    LlamaForSequenceClassification.from_pretrained(llama, dtype=torch.float32)
    assert after_ours == torch.rand(1).item()

    model = load_model(llama, {"zero_optimization": {"stage": 0}}, torch_dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="contradicts the ds_config"):
        load_model(llama, BF16, torch_dtype=torch.float16)

    with streaming(BF16):  # the file is fp32 and its config says fp16, in which its values are infinite
        model = AutoModelForCausalLM.from_pretrained(half)
    assert torch.isfinite(partition_of(model.lm_head.weight)).all()
    report = get_load_report(model)
    assert (
        "an ordinary load keeps another: " in report.notes[0]
        and f"({report.contents.split()[0]} in all)" in report.notes[0]
    )

    class Forgetful(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.gate = torch.nn.Parameter(torch.empty(101, 1009))  # nothing in _init_weights knows of it
            self.post_init()

    with warnings.catch_warnings(record=True) as caught, streaming(FP32):
        warnings.simplefilter("always")
        forgetful = Forgetful.from_pretrained(llama)
    unset = "not in the files, and left uninitialized by transformers: gate; they are zero"
    assert unset in get_load_report(forgetful).notes
    assert partition_of(forgetful.gate).abs().max().item() == 0.0
    assert len([w for w in caught if unset in str(w.message)]) == (1 if rank == 0 else 0)
    with warnings.catch_warnings(), streaming(FP32):  # by `python -W error`, say
        warnings.filterwarnings("error", message=".*left uninitialized")
        with pytest.raises(RankError, match=f"rank 0: UserWarning: .*{unset}"):
            Forgetful.from_pretrained(llama)

    state = AutoModelForCausalLM.from_pretrained(llama).state_dict() if rank == 0 else {}
    with pytest.raises(RankError, match="describing the model"), streaming(FP32):
        LlamaForCausalLM.from_pretrained(None, config=AutoConfig.from_pretrained(llama), state_dict=state)


def test_corner_cases(checkpoints: Path, tmp_path: Path) -> None:
    llama = builders.tiny_llama(checkpoints)
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model.lm_head.weight.data.fill_(1e5)
    model.save_pretrained(tmp_path / "half")
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    (tmp_path / "half" / "config.json").write_text(json.dumps({**config, "dtype": "float16", "torch_dtype": "float16"}))
    run_ranks(load_corner_cases, str(llama), str(tmp_path / "half"))
