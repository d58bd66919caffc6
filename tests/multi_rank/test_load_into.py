"""`load_into` fills what a mesh has sharded: every shard equals the ordinary load, whatever the placements are."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lowmem_load import (
    CheckpointError,
    ConfigError,
    LoadReport,
    LowMemLoadError,
    UnsupportedError,
    get_load_report,
    load_into,
    load_model,
)
from tests import builders
from tests.model_digest import differing
from tests.pipelines.pipeline import import_example
from tests.ranks import run_ranks


def built(path: str, dtype: torch.dtype, cls_name: str | None = None) -> nn.Module:
    """A model on meta, as its owner builds it before sharding."""
    config = transformers.AutoConfig.from_pretrained(path)
    cls = getattr(transformers, cls_name or config.architectures[0])
    with torch.device("meta"):
        return cls(config).to(dtype)


def filled(path: str, shard: Callable[[nn.Module], None], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model that `shard` has cut up, with the values of its files."""
    model = built(path, dtype)
    shard(model)
    model.to_empty(device="cpu")
    load_into(model, path)
    return model


def layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith(("DecoderLayer", "BertLayer"))]


def shard_fully(model: nn.Module, **kwargs: Any) -> None:
    for layer in layers(model):
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)


def parallelize(model: nn.Module, mesh: Any) -> None:
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            plan[name] = ColwiseParallel()
        if isinstance(module, nn.Linear) and name.endswith(("o_proj", "down_proj")):
            plan[name] = RowwiseParallel()
    parallelize_module(model, mesh, plan)


def meshes(world_size: int) -> dict[str, Callable[[nn.Module], None]]:
    """How to shard a model, by name, on 2 or 4 ranks."""
    line = init_device_mesh("cpu", (world_size,))

    def columns(parameter: nn.Parameter) -> Shard:
        return Shard(1) if parameter.ndim > 1 and parameter.shape[1] % world_size == 0 else Shard(0)

    if world_size == 2:
        return {
            "fsdp": lambda model: shard_fully(model, mesh=line),
            "columns": lambda model: shard_fully(model, mesh=line, shard_placement_fn=columns),
        }
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parts = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "ep"))
    flattened = parts["dp", "cp"]._flatten("dp_cp")

    def tensor_parallel(model: nn.Module) -> None:
        parallelize(model, both["tp"])
        shard_fully(model, mesh=both["dp"])

    return {
        "hsdp": lambda model: shard_fully(model, mesh=replicas),
        "tp x fsdp": tensor_parallel,
        "flattened": lambda model: shard_fully(model, mesh=flattened),
    }


def start() -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # rank 0's counts
    return int(os.environ["WORLD_SIZE"])


def losses(model: nn.Module, num_steps: int = 10, optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """Train on the same tokens on each rank. By SGD: of Adam's dozen operations each is dispatched for each DTensor."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    tokens = torch.randint(0, 7, (2, 8), generator=generator)
    found = []
    model.train()
    for _ in range(num_steps):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def fill_again(model: Any, path: str) -> None:
    """Fill a model that has run, of which FSDP2 keeps the root gathered."""
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(1)
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    with torch.inference_mode():
        load_into(model, path)
    model.reshard()  # what counts are the shards


CONVERTED = ("llama, masters in fp32", "mixtral, experts fused on load")


def fill_all(cases: dict[str, tuple[str, torch.dtype, str | None]], is_whole: bool) -> None:
    """Rank function: each case on the first mesh, and two (or each, for `is_whole`) on the others."""
    world_size = start()
    for number, (mesh, shard) in enumerate(meshes(world_size).items()):
        for name, (path, dtype, cls_name) in cases.items():
            if number > 0 and not is_whole and name not in CONVERTED:
                continue
            model = built(path, dtype, cls_name)
            shard(model)
            model.to_empty(device="cpu")
            for tensor in (*model.parameters(), *model.buffers()):
                with torch.no_grad():
                    (tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor).fill_(7)
            torch.manual_seed(torch.distributed.get_rank())
            before = [*model.parameters(), *model.buffers()]
            report = load_into(model, path)
            assert all(one is other for one, other in zip(before, [*model.parameters(), *model.buffers()], strict=True))
            torch.manual_seed(0)
            cls = getattr(transformers, cls_name or transformers.AutoConfig.from_pretrained(path).architectures[0])
            reference, info = cls.from_pretrained(path, dtype=dtype, output_loading_info=True)
            assert differing(model, reference.to(dtype)) == [], (mesh, name)
            assert sorted(report.loading_info["missing_keys"]) == sorted(info["missing_keys"])
            assert isinstance(report, LoadReport) and get_load_report(model) is report
            if (mesh, name) == ("fsdp", "llama, masters in fp32"):
                fill_again(model, path)
                assert differing(model, reference) == []
            assert report.ds_config == {} and not any("ZeRO" in note for note in report.notes), report.notes


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.release)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_shards_equal_the_ordinary_load(checkpoints: Path, minilm: Path, world_size: int, is_whole: bool) -> None:
    float32, bfloat16 = torch.float32, torch.bfloat16
    odd = builders.tiny_llama(checkpoints, float32, "20KB", **builders.ODD_SIZES)
    cases: dict[str, tuple[str, torch.dtype, str | None]] = {
        "llama": (str(builders.tiny_llama(checkpoints)), bfloat16, None),
        "llama, masters in fp32": (str(builders.tiny_llama(checkpoints)), float32, None),
        "llama, odd sizes, sharded, cast": (str(odd), bfloat16, None),
        "qwen2, tied": (str(builders.tiny_qwen2_tied(checkpoints)), bfloat16, None),
        "mixtral, experts fused on load": (str(builders.tiny_mixtral(checkpoints)), bfloat16, None),
        "minilm, classifier missing": (str(minilm), float32, "BertForSequenceClassification"),
    }
    if world_size == 4:  # tensor parallelism takes even sizes
        del cases["llama, odd sizes, sharded, cast"]
    run_ranks(fill_all, cases, is_whole, world_size=world_size, timeout_s=240)


def train_on_mesh(path: str, out: str, options: list[str]) -> None:
    """Rank function: the example trains as after a plain load, and goes on from a checkpoint of DCP as if unstopped."""
    main = import_example("mesh_loop").main
    common = ["--model", path, "--save-steps", "2", *options, "--output"]
    default = main([*common, f"{out}/default", "--steps", "4", "--default-loader"])
    assert main([*common, f"{out}/ours", "--steps", "2"]) == default[:2]
    assert main([*common, f"{out}/ours", "--steps", "4", "--resume"]) == default[2:]


# PEFT before 0.21 calls the base model's forward itself, past the hooks by which FSDP2 gathers the root's parameters.
NEEDS_PEFT_0_21 = pytest.mark.skipif(
    Version(peft.__version__) < Version("0.21"), reason="PEFT calls forward past FSDP2's hooks"
)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--lora"], marks=NEEDS_PEFT_0_21),
        *(pytest.param(["--tp", size], marks=pytest.mark.release) for size in "12"),
    ],
)
def test_the_example_trains_as_by_default_and_resumes(tmp_path: Path, options: list[str]) -> None:
    import_example("make_model").main([str(tmp_path / "tiny")])
    run_ranks(train_on_mesh, str(tmp_path / "tiny"), str(tmp_path), options, timeout_s=240)


def adapted_as_verl(path: str, mesh: Any, dtype: torch.dtype, adapt: Callable[[nn.Module], Any]) -> nn.Module:
    """What verl does: rank 0 has the whole model and draws the adapter, or reads it; all is broadcast into shards.

    Source: verl 0.9.1 `workers/engine/fsdp/transformer_impl.py`, `_build_module`, `_build_lora_module` and
    `_build_fsdp_module`; `utils/fsdp_utils.py`, `fsdp2_load_full_state_dict`.
    """
    is_first = torch.distributed.get_rank() == 0
    base = transformers.LlamaForCausalLM.from_pretrained(path, dtype=dtype) if is_first else built(path, dtype)
    model = adapt(base)
    full_state = model.state_dict()
    import_example("mesh_loop").parallelize(base, mesh)
    if not is_first:
        model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full_state, options=options)
    for _, buffer in sorted(model.named_buffers()):
        torch.distributed.broadcast(buffer, 0)
    return model


def adapt_all(path: str, tied: str, folder: str) -> None:
    """Rank function: adapters that are drawn, and adapters of a folder, as verl's `lora_adapter_path` names it."""
    from peft import LoraConfig, PeftModel, get_peft_model

    mesh = init_device_mesh("cpu", (start(), 1), mesh_dim_names=("dp", "tp"))
    config = {"r": 3, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}

    def draw(base: nn.Module) -> nn.Module:
        adapted = get_peft_model(base, LoraConfig(**config))
        of_base = next(each.dtype for each in adapted.parameters() if not each.requires_grad)
        for parameter in adapted.parameters():
            parameter.data = parameter.data.to(of_base)  # as verl does: PEFT draws in fp32
        return adapted

    def read(base: nn.Module) -> nn.Module:
        return PeftModel.from_pretrained(base, folder, is_trainable=True)

    if torch.distributed.get_rank() == 0:
        first = get_peft_model(built(path, torch.float32).to_empty(device="cpu"), LoraConfig(**config))
        for parameter in first.parameters():
            nn.init.normal_(parameter)
        first.save_pretrained(folder)
    torch.distributed.barrier()
    for name, adapt in (("drawn", draw), ("read", read)):
        torch.manual_seed(torch.distributed.get_rank())  # rank 0's counts
        default = adapted_as_verl(path, mesh, torch.float32, adapt)
        torch.manual_seed(torch.distributed.get_rank())
        ours = import_example("mesh_loop").load_adapted(path, mesh, "cpu", adapt)
        whole = {key: each.full_tensor() for key, each in default.named_parameters()}
        found = {key: each.full_tensor() for key, each in ours.named_parameters()}
        assert found.keys() == whole.keys()
        assert [key for key in found if not torch.equal(found[key], whole[key])] == [], name
        adapters = {key for key in found if "lora_" in key}
        assert {key for key, each in ours.named_parameters() if each.requires_grad} == adapters
        assert all(found[key].any() for key in adapters if "lora_A" in key or name == "read")
        assert dict(ours.named_buffers()).keys() == dict(default.named_buffers()).keys()
        assert losses(ours, 3) == losses(default, 3)
    base: Any = import_example("mesh_loop").load_adapted(tied, mesh, "cpu", draw).get_base_model()
    assert base.lm_head.weight is base.model.embed_tokens.weight


@NEEDS_PEFT_0_21
def test_adapters_equal_those_of_peft_on_a_whole_model(checkpoints: Path, tmp_path: Path) -> None:
    path, tied = builders.tiny_llama(checkpoints, torch.float32), builders.tiny_qwen2_tied(checkpoints)
    run_ranks(adapt_all, str(path), str(tied), str(tmp_path / "adapter"), timeout_s=120)


def refuse_all(path: str) -> None:
    """Rank function: what cannot be filled is one named error on all ranks, and nothing is returned."""
    mesh = init_device_mesh("cpu", (start(),))
    model = built(path, torch.bfloat16)
    shard_fully(model, mesh=mesh)
    with pytest.raises(UnsupportedError, match=r"weight: has no memory .* call model.to_empty"):
        load_into(model, path)

    model.to_empty(device="cpu")
    with pytest.raises(ConfigError, match="remove device_map"):
        load_into(model, path, device_map="cpu")
    with pytest.raises(LowMemLoadError, match="no-such-folder"):
        load_into(model, path + "/no-such-folder")
    dtype = (torch.bfloat16, torch.float32)[torch.distributed.get_rank()]
    with pytest.raises(LowMemLoadError, match=r"has dtype float32, where rank\(s\) 0 have bfloat16"):
        load_into(model, path, dtype=dtype)

    model.value_head = nn.Linear(4, 1)
    with pytest.raises(CheckpointError, match=r"neither a file nor a rule fills: value_head.bias, value_head.weight"):
        load_into(model, path)
    del model.value_head, model.lm_head
    with pytest.raises(CheckpointError, match=r"that the model lacks: lm_head.weight"):
        load_into(model, path)

    partial = built(path, torch.bfloat16).to_empty(device="cpu")
    sums = DTensor.from_local(partial.lm_head.weight.detach(), mesh, [Partial()], run_check=False)
    partial.lm_head.weight = nn.Parameter(sums)
    with pytest.raises(UnsupportedError, match=r"lm_head.weight: has the placement P.* no checkpoint can fill"):
        load_into(partial, path)

    wrapped = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="FSDP1"):
        load_into(wrapped, path)


def fill_in_dtypes(path: str) -> None:
    """Rank function: any floating-point dtype is that of the ordinary load, by either keyword, and no other."""
    mesh = init_device_mesh("cpu", (start(),))
    float64, bfloat16 = torch.float64, torch.bfloat16
    ordinary = transformers.AutoModelForCausalLM.from_pretrained
    expected = ordinary(path, dtype=float64)

    def shard(model: nn.Module) -> None:
        shard_fully(model, mesh=mesh)

    of_mesh: list[dict[str, Any]] = [{"dtype": float64}, {"torch_dtype": "float64"}, {}]
    for model in (filled(path, shard, float64), *(load_model(path, mesh=mesh, **dtype) for dtype in of_mesh)):
        assert {parameter.dtype for parameter in model.parameters()} == {float64}
        assert differing(model, expected) == [] and get_load_report(model).notes == []
    model = load_model(path, mesh=mesh, torch_dtype=bfloat16)
    assert differing(model, ordinary(path, dtype=bfloat16)) == []

    mixed = built(path, bfloat16)
    mixed.lm_head.weight = nn.Parameter(mixed.lm_head.weight.double())
    shard(mixed)
    load_into(mixed.to_empty(device="cpu"), path)
    assert torch.equal(mixed.lm_head.weight.full_tensor(), expected.lm_head.weight)
    rounded = expected.model.embed_tokens.weight.bfloat16()
    assert torch.equal(mixed.model.embed_tokens.weight.full_tensor(), rounded)

    for dtype in ("bf16", torch.int8, "load"):
        with pytest.raises(ConfigError, match=f"dtype '?{dtype}'? is not a floating-point dtype of torch"):
            load_into(model, path, dtype=dtype)
        with pytest.raises(ConfigError, match="is not a floating-point dtype"):
            load_model(path, mesh=mesh, dtype=dtype)


def test_any_dtype_is_that_of_the_ordinary_load(checkpoints: Path, tmp_path: Path) -> None:
    folder = builders.tiny_llama(checkpoints, torch.float32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data /= 3  # needs bits that fp32 does not have
    model.save_pretrained(tmp_path)
    run_ranks(fill_in_dtypes, str(tmp_path))


class VisionLanguage(nn.Module):
    """A transformers model next to parts that no file of it has."""

    def __init__(self, llm: nn.Module) -> None:
        super().__init__()
        self.tower, self.llm = nn.Linear(3, 4), llm
        self.register_buffer("mean", torch.empty(3))


def fill_with_others(path: str) -> None:
    """Rank function: what is next to the model that the files fill is named by the caller, or in one error."""
    mesh = init_device_mesh("cpu", (start(),))
    with torch.device("meta"):
        model = VisionLanguage(built(path, torch.float32))
    shard_fully(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), model.mean]:
            tensor.fill_(7)
    others = ["tower.weight", "tower.bias", "mean"]
    for leave, lost in (((), "mean, tower.bias, tower.weight"), (others[:2], "mean")):
        with pytest.raises(
            ConfigError, match=f"VisionLanguage: .* LlamaForCausalLM at 'llm', and not {lost} next to it"
        ):
            load_into(model, path, skip=leave)
    with pytest.raises(ConfigError, match=r"skip: .* lm_head"):
        load_into(model, path, skip=[*others, "lm_head.weigth"])
    assert all(bool((tensor.to_local() == 7).all()) for tensor in model.parameters()), "nothing is filled"

    head = "lm_head.weight"
    for name in (f"llm.{head}", head):  # a name of either model
        load_into(model, path, skip=[*others, name])
        reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert differing(model.llm, reference) == [head]
        assert bool((model.llm.lm_head.weight.to_local() == 7).all())
    load_into(model, path, skip=others)
    assert differing(model.llm, reference) == []
    assert bool((model.mean == 7).all()) and bool((model.tower.weight.to_local() == 7).all())


@pytest.mark.parametrize("check", [refuse_all, fill_with_others])
def test_what_is_refused_and_what_is_left(check: Callable[[str], None], checkpoints: Path) -> None:
    run_ranks(check, str(builders.tiny_llama(checkpoints)))
