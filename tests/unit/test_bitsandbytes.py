"""bitsandbytes in 4 bits, as far as one process can show it: plans, the packed bytes, and files that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lowmem_load import load_model, plan
from lowmem_load.errors import CheckpointError, UnsupportedError
from lowmem_load.files import memory
from lowmem_load.quantized.bitsandbytes import BitsAndBytes4Bit
from tests import builders
from tests.parity import BF16

bnb = pytest.importorskip("bitsandbytes")

WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def quantization(**options: Any) -> BitsAndBytesConfig:
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16, **options}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, **settings)


@pytest.fixture(scope="module")
def plain(checkpoints: Path) -> Path:
    """Of 2 layers with 7 weights each, none of which 64 divides: hidden size 30, intermediate size 74."""
    sizes = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}
    return builders.tiny_llama(checkpoints, hidden_size=30, intermediate_size=74, **sizes)


@pytest.fixture(scope="module")
def packed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, packed, as most published ones are: bytes, scales quantized."""
    config = quantization(bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=torch.uint8)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, quantization_config=config)
    folder = tmp_path_factory.mktemp("packed")
    model.save_pretrained(folder)
    return folder


# -- plans -----------------------------------------------------------------------------------------------------------

SHAPES = [(24, 30), (8, 30), (8, 30), (30, 24), (74, 30), (74, 30), (30, 74)] * 2


def test_packing_at_load_is_planned(plain: Path) -> None:
    """Each rank reads its part of the weights for their scales, and the blocks that its partition touches."""
    plans = [plan(plain, BF16, rank=rank, world_size=3, quantization_config=quantization()) for rank in range(3)]
    for each in plans:
        assert each.num_quantized == len(SHAPES)
        scales = sum(4 * (-(-a * b // 64) + 16) for a, b in SHAPES)  # float32; 16 codes
        assert each.companion_bytes == scales
        sizes = {target.name: target.shape for target in each.targets if target.companions}
        assert sizes[WEIGHT] == (24 * 30 // 2 // 2, 1)
        assert each.slow_paths == []
    whole = sum(a * b * 2 for a, b in SHAPES)
    held = sum(3 * 2 * -(-(a * b // 4) // 3) for a, b in SHAPES)
    rest = sum(target.held_bytes for each in plans for target in each.targets if not target.companions)
    assert sum(each.partition_bytes for each in plans) == held + rest
    blocks = sum(2 * 2 * 64 for _ in SHAPES)  # bytes of two that cross the borders of a partition
    read = sum(each.costs.read_bytes for each in plans) - sum(each.replicated_bytes for each in plans)
    assert 2 * whole < read < 2 * whole + 3 * blocks + rest


def test_packed_files_are_read_in_part(packed: Path) -> None:
    plans = [plan(packed, BF16, rank=rank, world_size=3) for rank in range(3)]
    values = sum(a * b // 2 for a, b in SHAPES)
    for each in plans:
        assert each.slow_paths == [] and each.num_quantized == len(SHAPES)
        of_packed = sum(d.fill.numel for target in each.targets if target.companions for d in target.destinations)
        assert abs(of_packed - values / 3) <= len(SHAPES)
        held = sum(d.fill.numel * target.dtype.itemsize for target in each.targets for d in target.destinations)
        assert each.costs.read_bytes == each.costs.needed_bytes == held + each.companion_bytes
        (target,) = [target for target in each.targets if target.name == WEIGHT]
        assert {c.name.rpartition(".")[2]: c.dtype for c in target.companions} == {
            "absmax": torch.uint8,
            "quant_map": torch.float32,
            "nested_absmax": torch.float32,
            "nested_quant_map": torch.float32,
            "bitsandbytes__nf4": torch.uint8,
        }
    assert len({each.fingerprint for each in plans}) == 1


def test_settings_are_what_ranks_agree_on(plain: Path) -> None:
    kinds: list[dict[str, Any]] = [{}, {"bnb_4bit_use_double_quant": True}, {"bnb_4bit_quant_type": "fp4"}]
    fingerprints = {
        plan(plain, BF16, rank=0, world_size=2, quantization_config=quantization(**kind)).fingerprint for kind in kinds
    }
    assert len(fingerprints) == 3


# -- loads -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("lone_process")
def test_transposed_weights_are_packed_as_by_the_default_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)).save_pretrained(tmp_path)
    monkeypatch.setattr(memory, "GROUPED_NUMEL", 512)  # fewer elements than the weights have
    before = dict(vars(bnb.nn.Params4bit))
    model = load_model(tmp_path, BF16, quantization_config=quantization())
    assert dict(vars(bnb.nn.Params4bit)) == before
    kwargs = {"dtype": torch.bfloat16, "quantization_config": quantization()}
    assert_same_packed(model, AutoModelForCausalLM.from_pretrained(tmp_path, **kwargs), count=4)


def assert_same_packed(model: torch.nn.Module, expected: torch.nn.Module, count: int) -> None:
    loaded, ordinary = dict(model.named_parameters()), dict(expected.named_parameters())
    assert list(loaded) == list(ordinary)
    kinds = {name for name, parameter in ordinary.items() if isinstance(parameter, bnb.nn.Params4bit)}
    assert len(kinds) == count
    for name, parameter in loaded.items():
        theirs = ordinary[name].data
        assert parameter.ds_tensor.dtype == theirs.dtype and parameter.ds_shape == theirs.shape, name
        ours = parameter.ds_tensor.data[: theirs.numel()]
        assert torch.equal(ours.view(torch.uint8), theirs.flatten().view(torch.uint8)), name
        if name in kinds:
            assert_same_state(parameter, ordinary[name])
            assert model.get_submodule(name.rpartition(".")[0]).quant_state is parameter.quant_state


def assert_same_state(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs) and ours.requires_grad is theirs.requires_grad is False
    for attribute in ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized"):
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    left, right = (each.quant_state.as_dict() for each in (ours, theirs))
    assert left.keys() == right.keys()
    for key, value in right.items():
        assert torch.equal(left[key], value) if isinstance(value, torch.Tensor) else left[key] == value, key


def test_other_loads_do_not_touch_bitsandbytes(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BitsAndBytes4Bit, "handlers", lambda _: pytest.fail("asked for"))
    plan(plain, BF16, rank=0, world_size=2)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_eight_bits_are_refused(plain: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"'bitsandbytes' cannot be partitioned by ZeRO-3.*in 4 bits"):
        plan(plain, BF16, rank=0, world_size=2, quantization_config=BitsAndBytesConfig(load_in_8bit=True))


def test_a_weight_that_no_file_has_is_refused(plain: Path, tmp_path: Path) -> None:
    copy_changed(plain, tmp_path, lambda tensors: tensors.pop(WEIGHT))
    with pytest.raises(CheckpointError, match=rf"{WEIGHT} are to have 4 bits, but the files"):
        plan(tmp_path, BF16, rank=0, world_size=2, quantization_config=quantization())


STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"


def spoiled_state(**fields: Any) -> Any:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        text = json.dumps({**json.loads(bytes(tensors[STATE].tolist())), **fields})
        tensors[STATE] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    return spoil


def shorter(key: str) -> Any:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key] = tensors[key][:-1].clone()

    return spoil


@pytest.mark.usefixtures("lone_process")
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoiled_state(shape=[30, 24]), r"weight of shape \(30, 24\), the module has one of shape \(24, 30\)"),
        (spoiled_state(blocksize=32), "it has .*absmax"),
        (spoiled_state(nested_blocksize=64), "scales quantized in blocks of 64"),
        (spoiled_state(dtype="no_dtype"), "AttributeError"),
        (shorter(f"{WEIGHT}.absmax"), "it has .*absmax"),
        (shorter(f"{WEIGHT}.nested_quant_map"), "it has .*nested_quant_map"),
        (shorter(WEIGHT), r"359 packed bytes for a weight of shape \(24, 30\)"),
        (shorter(STATE), "JSONDecodeError"),
    ],
)
def test_a_state_that_is_not_the_weight_s_is_refused(spoil: Any, words: str, packed: Path, tmp_path: Path) -> None:
    """bitsandbytes does not look, and its kernels would read what lies beyond."""
    copy_changed(packed, tmp_path, spoil)
    with pytest.raises(CheckpointError, match=rf"{WEIGHT}: no usable quantization state: .*{words}"):
        load_model(tmp_path, BF16)


def copy_changed(path: Path, folder: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((path / "config.json").read_text())
