"""What every quantized format must do: a new one gets a line of `WRITERS`."""

import functools
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import lowmem_load
from lowmem_load import foreign_names
from lowmem_load.errors import IncompatibleVersionError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.foreign_names import ForeignName
from lowmem_load.load import load_model
from lowmem_load.load.make_plan import PlannedModel
from lowmem_load.models.quantizers import FORMATS, format_of
from lowmem_load.planning.expression import hold
from lowmem_load.planning.regions import FlatRange
from lowmem_load.quantized.bitsandbytes import BitsAndBytes4Bit
from lowmem_load.quantized.dequantized import CompressedTensors, FineGrainedFp8, Mxfp4
from lowmem_load.quantized.format import QuantizedFormat
from lowmem_load.replaced import replaced
from lowmem_load.symbolic.tensor import SymbolicTensor
from tests.conversions.checkpoints import SCHEMES, write_compressed, write_fp8, write_mxfp4
from tests.parity import BF16

# transformers says so whenever `dequantize` is asked for of a checkpoint that has a quantization_config
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

WORLD_SIZES = (1, 3)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class Written(NamedTuple):
    """A checkpoint of a format, and the keywords to load it by."""

    kind: type[QuantizedFormat]
    folder: Path
    keywords: dict[str, Any]


def fp8(folder: Path) -> dict[str, Any]:
    try:
        importlib.import_module(foreign_names.FP8_DEQUANTIZE.module)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        pytest.skip("transformers 5.6 imports triton for fp8, which torch for CPUs lacks")
    if transformers.__version__.startswith("5.16."):
        pytest.skip("FineGrainedFP8HfQuantizer.update_tp_plan of transformers 5.16 fails for models without experts")
    write_fp8(folder)
    return {"quantization_config": transformers.FineGrainedFP8Config(weight_block_size=(64, 64), dequantize=True)}


def mxfp4(folder: Path) -> dict[str, Any]:
    write_mxfp4(folder)
    config = transformers.Mxfp4Config(modules_to_not_convert=["lm_head"], dequantize=True)
    return {"quantization_config": config}


def bitsandbytes(folder: Path) -> dict[str, Any]:
    pytest.importorskip("bitsandbytes")
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**SIZES, "hidden_size": 60}))
    model.save_pretrained(folder / "plain")
    options = {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16}
    config = transformers.BitsAndBytesConfig(**options, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.bfloat16)
    load(folder / "plain", quantization_config=config).save_pretrained(folder)
    return {}


def compressed(folder: Path, scheme: str) -> dict[str, Any]:
    pytest.importorskip("compressed_tensors", reason="an optional package of transformers")
    write_compressed(folder, transformers.LlamaConfig(**SIZES), scheme)
    return {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}


WRITERS: dict[str, tuple[type[QuantizedFormat], Callable[[Path], dict[str, Any]]]] = {
    "fp8": (FineGrainedFp8, fp8),
    "mxfp4": (Mxfp4, mxfp4),
    "bitsandbytes": (BitsAndBytes4Bit, bitsandbytes),
    **{scheme: (CompressedTensors, functools.partial(compressed, scheme=scheme)) for scheme in SCHEMES},
}
"""Of causal models, some of whose weights have sizes that ranks and blocks do not divide."""


@pytest.fixture(params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    kind, write = WRITERS[request.param]
    return Written(kind, tmp_path, write(tmp_path))


def test_its_configuration_is_recognized(written: Written) -> None:
    """As an object and as in a config.json, by this format alone; and no other one is."""
    in_file = json.loads((written.folder / "config.json").read_text())["quantization_config"]
    for config in filter(None, (in_file, written.keywords.get("quantization_config"))):
        assert [type(each) for each in FORMATS if each.recognizes(config)] == [written.kind]
        assert type(format_of(config)) is written.kind
    assert type(format_of({"quant_method": "another"})) is QuantizedFormat


def test_each_rank_reads_the_bytes_of_its_part(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it has after an ordinary load. No weight is read or computed in full. All ranks have one digest."""
    ordinary = AutoModelForCausalLM.from_pretrained(written.folder, dtype=torch.bfloat16, **written.keywords)
    expected = {name: value.detach().view(-1) for name, value in ordinary.named_parameters()}
    made: list[PlannedModel] = []
    make_plan = load_model.make_plan
    monkeypatch.setattr(load_model, "make_plan", lambda *args: made.append(make_plan(*args)) or made[-1])
    for world_size in WORLD_SIZES:
        digests = set()
        for rank in range(world_size):
            plan = lowmem_load.plan(written.folder, BF16, rank=rank, world_size=world_size, **written.keywords)
            digests.add(plan.fingerprint)
            assert plan.slow_paths == []
            assert bool(plan.num_quantized) is written.kind.stays_packed
            with Executor() as executor:
                for target in plan.targets:
                    fill, region = target.destinations[0].fill, target.destinations[0].region
                    assert fill is not None and isinstance(region, FlatRange)
                    memory = torch.empty(fill.numel, dtype=target.dtype)
                    executor.fill(fill, memory, plan.values, made[-1].constants)
                    executor.finish()
                    part = expected[target.name][region.start : region.end]
                    assert part.dtype == memory.dtype
                    assert torch.equal(memory.view(torch.uint8), part.view(torch.uint8)), target.name
        assert len(digests) == 1


def test_stacked_experts_of_compressed_tensors_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="an optional package of transformers")
    sizes = {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    write_compressed(tmp_path, transformers.Qwen3MoeConfig(**SIZES, **sizes), "fp8 by tensor")
    config = transformers.CompressedTensorsConfig(dequantize=True)
    with pytest.raises(UnsupportedError, match="dequantizes the experts of this model in full"):
        lowmem_load.plan(tmp_path, BF16, rank=0, world_size=2, quantization_config=config)


@pytest.mark.parametrize("name", [foreign_names.UNPACK_FP4, foreign_names.UNPACK_INT4], ids=str)
def test_codes_in_another_order_are_refused(name: ForeignName, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("compressed_tensors", reason="an optional package of transformers")
    module, is_fp4 = importlib.import_module(name.module), name == foreign_names.UNPACK_FP4
    ordinary = getattr(module, name.name)
    monkeypatch.setattr(module, name.name, lambda *args, **kwargs: ordinary(*args, **kwargs).flip(1))
    packed = torch.zeros(2, 4, dtype=torch.uint8 if is_fp4 else torch.int32)
    with Executor() as executor, replaced(CompressedTensors().handlers()):
        symbolic = SymbolicTensor(hold(packed), lambda part, _: read_whole(executor, part))
        with pytest.raises(IncompatibleVersionError, match=r"unpacks codes in another way .*compressed-tensors=="):
            getattr(module, name.name)(symbolic, *((2, 8) if is_fp4 else (4, (2, 32))))
