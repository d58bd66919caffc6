"""Every quantized format passes the shipped contract."""

import functools
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import lowmem_load
from lowmem_load import foreign_names
from lowmem_load.errors import IncompatibleVersionError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.foreign_names import ForeignName
from lowmem_load.planning.expression import hold
from lowmem_load.quantized.bitsandbytes import BitsAndBytes4Bit
from lowmem_load.quantized.compressed_tensors import CompressedTensors
from lowmem_load.quantized.fp8 import FineGrainedFp8
from lowmem_load.quantized.mxfp4 import Mxfp4
from lowmem_load.replaced import replaced
from lowmem_load.symbolic.tensor import SymbolicTensor
from tests.conversions.checkpoints import SCHEMES, write_compressed, write_fp8, write_mxfp4
from tests.kits.quantized import QuantizedFormatContract
from tests.parity import BF16

# transformers says so whenever `dequantize` is asked for of a checkpoint that has a quantization_config
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class TestFp8(QuantizedFormatContract):
    kind = FineGrainedFp8

    def write(self, folder: Path) -> dict[str, Any]:
        try:
            importlib.import_module(foreign_names.FP8_DEQUANTIZE.module)
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            pytest.skip("transformers 5.6 imports triton for fp8, which torch for CPUs lacks")
        write_fp8(folder)
        return {"quantization_config": transformers.FineGrainedFP8Config(weight_block_size=(64, 64), dequantize=True)}


class TestMxfp4(QuantizedFormatContract):
    kind = Mxfp4

    def write(self, folder: Path) -> dict[str, Any]:
        write_mxfp4(folder)
        config = transformers.Mxfp4Config(modules_to_not_convert=["lm_head"], dequantize=True)
        return {"quantization_config": config}


class TestBitsAndBytes4Bit(QuantizedFormatContract):
    kind = BitsAndBytes4Bit

    def write(self, folder: Path) -> dict[str, Any]:
        pytest.importorskip("bitsandbytes")
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**SIZES, "hidden_size": 60}))
        model.save_pretrained(folder / "plain")
        options = {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16}
        config = transformers.BitsAndBytesConfig(**options, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.bfloat16)
        load(folder / "plain", quantization_config=config).save_pretrained(folder)
        return {}


@pytest.mark.parametrize("scheme", SCHEMES)
class TestCompressedTensors(QuantizedFormatContract):
    kind = CompressedTensors

    @pytest.fixture(autouse=True)
    def chosen(self, scheme: str) -> None:
        self.scheme = scheme

    @pytest.fixture(autouse=True)
    def checkpoint(self, chosen: None, tmp_path: Path) -> None:
        self.folder = tmp_path
        self.keywords = self.write(tmp_path)

    def write(self, folder: Path) -> dict[str, Any]:
        pytest.importorskip("compressed_tensors", reason="an optional package of transformers")
        write_compressed(folder, transformers.LlamaConfig(**SIZES), self.scheme)
        return {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}


def test_stacked_experts_of_compressed_tensors_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="an optional package of transformers")
    sizes = {"num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    write_compressed(tmp_path, transformers.Qwen3MoeConfig(**SIZES, **sizes), "fp8 by tensor")
    config = transformers.CompressedTensorsConfig(dequantize=True)
    with pytest.raises(UnsupportedError, match="dequantizes the experts of this model whole"):
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
