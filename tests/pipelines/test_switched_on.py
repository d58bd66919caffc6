"""install(), however ZeRO-3 was switched on: the result of the default loader, or the default loader itself."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

import lowmem_load
from lowmem_load import RankError, UnsupportedError, get_load_report, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import ModelBuildError
from lowmem_load.integrations.install import streaming, uninstall
from tests import builders
from tests.parity import BF16, FP32, differences
from tests.ranks import run_ranks


@register_quantization_config("weights-as-they-are")
class AsTheyAreConfig(QuantizationConfigMixin):
    """Of a quantization that quantizes nothing: what transformers does for it, it does for all of them."""

    def __init__(self, **_: Any) -> None:
        self.quant_method = "weights-as-they-are"


@register_quantizer("weights-as-they-are")
class AsTheyAre(HfQuantizer):
    requires_calibration = False

    def _process_model_before_weight_loading(self, *_: Any, **__: Any) -> None: ...  # abstract in transformers 4

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class OnlyForZero3(LlamaForCausalLM):
    """Cannot be built as an ordinary load builds models."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        if not is_deepspeed_zero3_enabled():
            raise RuntimeError("not without ZeRO-3")


class CutsItself(LlamaForCausalLM):
    """Enters a zero.Init by itself."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        with deepspeed.zero.Init(config_dict_or_path=FP32):
            self.own = torch.nn.Linear(3, 3, device="cpu")


@contextlib.contextmanager
def installed(**keywords: Any) -> Iterator[None]:
    lowmem_load.install(**keywords)
    try:
        yield
    finally:
        uninstall()


def dtypes(model: Any) -> set[torch.dtype]:
    return {getattr(parameter, "ds_tensor", parameter).dtype for parameter in model.parameters()}


def told(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what a call returns, and the warnings of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(one.message) for one in caught if one.category.__module__.startswith("lowmem_load")]


def patched_names(path: str) -> None:
    """As axolotl does: the default path ran inside ours, without a ds_config, so in fp16."""
    plain = AutoModelForCausalLM.from_pretrained(path)
    with pytest.MonkeyPatch.context() as patch:
        for module in (transformers.modeling_utils, transformers.integrations.deepspeed):
            patch.setattr(module, "is_deepspeed_zero3_enabled", lambda: True)
        alive = HfDeepSpeedConfig(FP32)
        with installed():
            model, messages = told(lambda: AutoModelForCausalLM.from_pretrained(path))
    assert messages == []
    assert get_load_report(model).contents.startswith(f"{len(list(plain.parameters()))} tensors")
    assert differences(model, plain) == []
    del alive


def inside_zero_init(path: str) -> None:
    """As in Lightning's configure_model."""

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)

    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    alive = HfDeepSpeedConfig(BF16)
    with deepspeed.zero.Init(config_dict_or_path=BF16):
        with installed(strict=True):
            models = [load()]
        with streaming(BF16):
            models.append(load())
        models.append(load_model(path, BF16))
        own = torch.nn.Linear(4, 4)
    assert [differences(model, plain) for model in models] == [[], [], []]
    assert [int(get_load_report(model).contents.split()[0]) for model in models] == [len(list(plain.parameters()))] * 3
    assert hasattr(own.weight, "ds_id")

    # One that makes other parameters wins by default, whatever the active ds_config says.
    with deepspeed.zero.Init(config_dict_or_path=FP32):
        with installed():
            model, messages = told(load)
        assert dtypes(model) == {torch.float32} == dtypes(load())
        with streaming(BF16), pytest.raises(UnsupportedError, match=r"makes torch\.float32 parameters"):
            load()
    assert len(messages) == 1
    assert "give zero.Init the same ds_config" in messages[0]
    del alive


def unresolved_precision(path: str) -> None:
    for bf16, fp16 in (("auto", "auto"), (False, "auto"), ("auto", False), (True, "auto")):
        alive = HfDeepSpeedConfig({**FP32, "bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}})
        default = dtypes(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
        with installed():
            assert dtypes(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)) == default, (bf16, fp16)
        del alive


def quantized(path: str) -> None:
    alive = HfDeepSpeedConfig(BF16)

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(path, quantization_config=AsTheyAreConfig())

    default = load().state_dict()
    with installed():
        model, messages = told(load)
        assert [text.partition(":")[2][:77] for text in messages] == [
            " lowmem_load cannot load this, so the default ZeRO-3 loader does: Unsupported"
        ]
        assert "quantization 'weights-as-they-are'" in messages[0]
        values = model.state_dict()
        assert [name for name in default if not torch.equal(default[name], values[name])] == []
        assert told(lambda: deepspeed.initialize(model=model, config=BF16))[1] == []
        with pytest.raises(ValueError, match="the default ZeRO-3 loader has loaded it: UnsupportedError: quantization"):
            get_load_report(model)
    refusal = pytest.raises(UnsupportedError, match="quantization 'weights-as-they-are'")
    with installed(strict=True), refusal:
        load()
    with streaming(BF16), refusal:
        load()
    with refusal:
        load_model(path, BF16, quantization_config=AsTheyAreConfig())
    del alive


def what_cannot_be_described(path: str) -> None:

    alive = HfDeepSpeedConfig(FP32)
    torch.manual_seed(1)
    default = OnlyForZero3.from_pretrained(path)
    torch.manual_seed(1)
    with installed():
        model, messages = told(lambda: OnlyForZero3.from_pretrained(path))
    assert len(messages) == 1
    assert "OnlyForZero3 cannot be built" in messages[0]
    for ours, theirs in zip(model.parameters(), default.parameters(), strict=True):
        assert torch.equal(ours.ds_tensor[: ours.ds_numel // 2], theirs.ds_tensor[: ours.ds_numel // 2])
    with installed(strict=True):
        with pytest.raises(ModelBuildError, match="OnlyForZero3 cannot be built"):
            OnlyForZero3.from_pretrained(path)
        with pytest.raises(UnsupportedError, match=r"own\.weight: was partitioned .* the __init__ of CutsItself"):
            CutsItself.from_pretrained(path)
    del alive


def on_one_rank(path: str) -> None:
    """What only one rank cannot stream is an error on all: the others would wait in another load."""
    alive = HfDeepSpeedConfig(BF16)
    keywords = {"quantization_config": AsTheyAreConfig()} if os.environ["RANK"] == "1" else {}
    with installed(), pytest.raises(RankError, match="rank 1: UnsupportedError: quantization"):
        AutoModelForCausalLM.from_pretrained(path, **keywords)
    del alive


CHECKS = (*(patched_names, inside_zero_init, unresolved_precision, quantized, what_cannot_be_described), on_one_rank)


def run(checks: tuple[Callable[[str], None], ...], path: str) -> None:
    DistributedInterface()
    for check in checks:
        check(path)


def test_however_zero_3_is_switched_on_a_load_is_as_by_default(checkpoints: Path) -> None:
    run_ranks(run, CHECKS, str(builders.tiny_llama(checkpoints, torch.float32)), timeout_s=180)
