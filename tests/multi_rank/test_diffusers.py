"""Models of diffusers: shards and partitions equal its plain load, files equal its plain save."""

import copy
import os
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.integrations import HfDeepSpeedConfig

from lowmem_load import (
    CheckpointError,
    ConfigError,
    FallbackWarning,
    RankError,
    UnsupportedError,
    get_load_report,
    install,
    iter_weights,
    load_model,
    plan,
    save_model,
)
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.integrations.install import uninstall
from lowmem_load.load.lazy import LazyReader
from lowmem_load.load.load_model import plan_rank
from lowmem_load.symbolic.lazy import is_unread
from tests.model_digest import differing, whole_tensors
from tests.multi_rank.test_own_modules import Z3, assert_sent_as_saved
from tests.multi_rank.test_save import equal_folders
from tests.ranks import run_ranks

diffusers = pytest.importorskip("diffusers")

MODELS = ("FluxTransformer2DModel", "WanTransformer3DModel")

SETTINGS: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": {
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "in_channels": 16,
        "axes_dims_rope": (4, 6, 6),
    },
    "WanTransformer3DModel": {  # keeps modules in fp32, and a table that its constructor computes
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "text_dim": 32,
        "freq_dim": 64,
        "ffn_dim": 96,
        "num_layers": 2,
        "in_channels": 4,
        "out_channels": 4,
        "rope_max_seq_len": 32,
    },
    "UNet2DConditionModel": {
        "sample_size": 8,
        "layers_per_block": 1,
        "block_out_channels": (16, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 16,
        "attention_head_dim": 4,
        "norm_num_groups": 4,
    },
    "AutoencoderKL": {"block_out_channels": (32,), "norm_num_groups": 8, "latent_channels": 2},
}
WITHOUT = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
BF16 = {**Z3, "bf16": {"enabled": True}}


def write(folder: Path) -> None:
    for name, settings in SETTINGS.items():
        torch.manual_seed(0)
        model = getattr(diffusers, name)(**settings)
        for parameter in model.parameters():
            parameter.data.normal_()
        size = "200KB" if name.startswith("Flux") else "10GB"
        model.to(torch.bfloat16 if name.startswith("Flux") else torch.float32)
        model.save_pretrained(folder / name, max_shard_size=size)
    models = {
        "transformer": diffusers.FluxTransformer2DModel.from_pretrained(folder / "FluxTransformer2DModel"),
        "vae": diffusers.AutoencoderKL.from_pretrained(folder / "AutoencoderKL"),
    }
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    diffusers.FluxPipeline(scheduler=scheduler, **models, **WITHOUT).save_pretrained(folder / "pipe")


def assert_saved(model: nn.Module, reference: Any, folder: Path) -> None:
    """Assert that a save is byte for byte that of diffusers. Collective."""
    save_model(model, folder / "ours", max_shard_size="100KB")
    assert_files_equal(reference, folder)
    assert_sent_as_saved(model, folder / "ours")


def assert_own_save(model: Any, reference: Any, folder: Path) -> None:
    """Assert that under `install` diffusers' own save of a model in parts is that of the whole one. Collective."""
    model.save_pretrained(folder / "ours", max_shard_size="100KB")
    assert_files_equal(reference, folder)
    model.save_pretrained(folder / "ours", True, None, max_shard_size="100KB", use_flashpack=False, token=None)
    others = {"safe_serialization": False, "use_flashpack": True, "push_to_hub": True, "something_new": 3}
    for key, value in others.items():
        with pytest.raises(UnsupportedError, match=f"{key}={value}"):
            model.save_pretrained(folder / "ours", **{key: value})


def assert_falls_back(path: Path) -> None:
    """Assert that there is a warning of loads that diffusers does by itself; here they fail then."""
    flux, bnb = diffusers.FluxTransformer2DModel, diffusers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.warns(FallbackWarning, match="from_single_file: lowmem_load cannot"), pytest.raises(Exception):  # noqa: B017, PT011
        flux.from_single_file(str(path / "diffusion_pytorch_model.safetensors"))
    with pytest.warns(FallbackWarning, match="quantization_config"), pytest.raises(Exception):  # noqa: B017, PT011
        flux.from_pretrained(path, quantization_config=bnb)


def adapted(model: Any) -> Any:
    from peft import LoraConfig

    torch.manual_seed(0)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights="gaussian"))
    return model


def assert_lora_is_sent(model: Any, expected: Any) -> None:
    """Assert that `iter_weights` yields the tensors for diffusers' `save_lora_weights`. Collective."""
    from peft import get_peft_model_state_dict

    buckets = iter_weights(model, names=lambda name: "lora_" in name)
    lora = {name.replace(".default", ""): tensor for bucket in buckets for name, tensor in bucket}
    saved = get_peft_model_state_dict(expected)
    assert lora.keys() == saved.keys() != set()
    assert all(torch.equal(lora[name], saved[name]) for name in saved)


def assert_files_equal(reference: Any, folder: Path) -> None:
    if dist.get_rank() == 0:
        reference.save_pretrained(folder / "default", max_shard_size="100KB")
        equal_folders(folder / "ours", folder / "default")
    dist.barrier()


def load_by_name(folder: Path) -> list[int]:
    """Rank function: load_model by a ds_config and over a mesh, plan, save_model. Returns the bytes read for a mesh."""
    rank = DistributedInterface().rank
    mesh, read_bytes = init_device_mesh("cpu", (2,)), list[int]()
    for name in MODELS:
        cls = getattr(diffusers, name)
        whole = cls.from_pretrained(folder / name, torch_dtype=torch.bfloat16)
        model = load_model(folder / name, mesh=mesh, dtype="torch.bfloat16")
        assert {n: p.dtype for n, p in model.named_parameters()} == {n: p.dtype for n, p in whole.named_parameters()}
        assert not differing(model, whole)
        all_bytes = sum(file.stat().st_size for file in (folder / name).glob("*.safetensors"))
        read_bytes.append(model.lowmem_load_report.read_bytes)
        assert read_bytes[-1] < 0.55 * all_bytes
        assert not model.training
        assert_saved(model, whole, folder / f"{name} mesh")
        install()
        assert_own_save(model, whole, folder / f"{name} own")
        uninstall()

        model = load_model(folder / name, BF16)
        in_bf16 = cls.from_pretrained(folder / name)
        for parameter in in_bf16.parameters():  # ZeRO-3 has one dtype for all, as by default
            parameter.data = parameter.data.bfloat16()
        assert not differing(model, in_bf16)
        report = model.lowmem_load_report
        assert report.read_bytes < 0.55 * all_bytes
        assert plan(folder / name, BF16, rank=rank, world_size=2).costs.read_bytes == report.read_bytes
        if name.startswith("Flux"):
            assert_saved(model, whole, folder / f"{name} zero3")
    assert_pipeline(folder, mesh)
    (folder / "broken").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match="the folder is empty"):
        load_model(folder / "broken", BF16)
    return read_bytes


def assert_pipeline(folder: Path, mesh: Any) -> None:
    """Of a pipeline the named models are sharded, and diffusers loads the others."""
    pipe = folder / "pipe"
    flux, vae = (
        diffusers.FluxTransformer2DModel.from_pretrained(pipe / "transformer"),
        diffusers.AutoencoderKL.from_pretrained(pipe / "vae"),
    )
    with pytest.raises(ConfigError, match="is a pipeline of diffusers"):
        load_model(pipe, mesh=mesh)
    transformer = load_model(pipe, mesh=mesh, subfolder="transformer")
    loaded = diffusers.FluxPipeline.from_pretrained(pipe, transformer=transformer, **WITHOUT)
    assert not differing(loaded.transformer, flux)
    assert not differing(loaded.vae, vae)


def load_in_script(folder: Path) -> None:
    """Rank function: from_pretrained of scripts, for ZeRO-3 and for accelerate's FSDP2."""
    rank = DistributedInterface().rank
    flux, vae = diffusers.FluxTransformer2DModel, diffusers.AutoencoderKL
    whole = flux.from_pretrained(folder / "FluxTransformer2DModel", torch_dtype=torch.bfloat16)
    all_bytes = sum(file.stat().st_size for file in (folder / "FluxTransformer2DModel").glob("*.safetensors"))
    install()
    alive = HfDeepSpeedConfig(BF16)
    model = flux.from_pretrained(folder / "FluxTransformer2DModel", torch_dtype=torch.bfloat16)
    with_lora = adapted(flux.from_pretrained(folder / "FluxTransformer2DModel", torch_dtype=torch.bfloat16))
    left = vae.from_pretrained(folder / "AutoencoderKL")
    assert all(map(is_unread, model.parameters()))
    assert not any(map(is_unread, left.parameters()))
    deepspeed.initialize(model=model, config=BF16)
    assert get_load_report(model).read_bytes < 0.55 * all_bytes
    assert not differing(model, whole)
    assert_own_save(model, whole, folder / "zero3")
    assert_falls_back(folder / "FluxTransformer2DModel")
    deepspeed.initialize(model=with_lora, config=BF16)
    del alive
    uninstall()
    expected = adapted(copy.deepcopy(whole)).bfloat16()
    assert not differing(with_lora, expected)
    assert_lora_is_sent(with_lora, expected)
    os.environ |= {"ACCELERATE_USE_FSDP": "1", "FSDP_VERSION": "2"}
    install()
    if rank == 0:  # scripts try what they have trained on the main rank
        loaded = diffusers.FluxPipeline.from_pretrained(folder / "pipe", **WITHOUT)
        assert not any(map(is_unread, loaded.transformer.parameters()))
    assert not any(map(is_unread, vae.from_pretrained(folder / "AutoencoderKL").parameters()))
    model = flux.from_pretrained(folder / "FluxTransformer2DModel", torch_dtype=torch.bfloat16)
    uninstall()
    assert all(map(is_unread, model.parameters()))
    adapted(model)
    for block in model.transformer_blocks:
        fully_shard(block)
    fully_shard(model)
    assert not differing(model, adapted(whole))
    assert_lora_is_sent(model, whole)


def losses_of(model: Any, step: Any) -> list[float]:
    """Losses of three steps of training Wan, on data of this rank."""
    rank, losses = int(os.environ["RANK"]), []
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + rank)
        noisy, target = (torch.randn(1, 4, 2, 8, 8, generator=generator) for _ in range(2))
        text = torch.randn(1, 6, 32, generator=generator)
        loss = nn.functional.mse_loss(model(noisy, torch.tensor([500]), text, return_dict=False)[0], target)
        step(loss)
        losses.append(loss.item())
    return losses


def train(folder: Path) -> None:
    """Rank function: a video model trains as after the default load, which ends with full models on all ranks."""
    DistributedInterface()
    cls, path = diffusers.WanTransformer3DModel, folder / "WanTransformer3DModel"
    mesh, default = init_device_mesh("cpu", (2,)), cls.from_pretrained(path)
    for module in (*default.blocks, default):
        fully_shard(module, mesh=mesh)
    losses = []
    models = [load_model(path, mesh=mesh, dtype="float32"), default]
    for model in models:
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)

        def step(loss: torch.Tensor, optimizer: Any = optimizer) -> None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        losses.append(losses_of(model, step))
    reference = cls.from_pretrained(path)
    reference.load_state_dict({name: tensor.full_tensor() for name, tensor in default.state_dict().items()})
    assert_saved(models[0], reference, folder / "fsdp2")
    config = {**Z3, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    config["zero_force_ds_cpu_optimizer"] = False
    for load in (lambda: load_model(path, config), lambda: cls.from_pretrained(path)):
        engine, *_ = deepspeed.initialize(model=load().train(), config=config)

        def step_of_engine(loss: torch.Tensor, engine: Any = engine) -> None:
            engine.backward(loss)
            engine.step()

        losses.append(losses_of(engine, step_of_engine))
        save_model(engine, folder / f"zero3 {len(losses)}")
    assert losses[0] == losses[1] and losses[2] == losses[3], losses
    files = [folder / f"zero3 {number}" / "diffusion_pytorch_model.safetensors" for number in (3, 4)]
    assert files[0].read_bytes() == files[1].read_bytes()


# -- what scripts do to a model before its engine ----------------------------------------------------------------------


def zeroed(unet: Any, _: Path) -> None:
    nn.init.zeros_(unet.conv_out.weight)


def scaled(unet: Any, _: Path) -> None:
    unet.conv_in.weight.data.mul_(2)


def drawn(unet: Any, _: Path) -> None:
    """Ranks draw different values: those of rank 0 count."""
    torch.manual_seed(int(os.environ["RANK"]))
    nn.init.normal_(unet.conv_in.weight)
    nn.init.normal_(unet.mid_block.resnets[0].conv1.weight[:4])


def read_by_one(unet: Any, _: Path) -> float:
    is_first = os.environ["RANK"] == "0"
    return float(unet.conv_in.weight.sum()) if is_first and unet.conv_in.weight.data_ptr() else 0.0


def copied(unet: Any, folder: Path) -> None:
    other = type(unet).from_pretrained(folder)
    other.conv_in.weight.data.mul_(3)
    unet.load_state_dict(other.state_dict())


def controlled(unet: Any, _: Path) -> Any:
    """As in its examples for ControlNet."""
    return diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(4, 8))


def mismatched(unet: Any, folder: Path) -> Any:
    """The new conv_in is what diffusers leaves in it: a script fills it."""
    how = {"in_channels": 9, "low_cpu_mem_usage": False, "ignore_mismatched_sizes": True}
    model = type(unet).from_pretrained(folder, **how)
    nn.init.ones_(model.conv_in.weight)
    return model


SCRIPTS = ((scaled, zeroed, drawn), (read_by_one, copied), (controlled,), (mismatched,))
"""More of what scripts do to lazy weights is in tests/unit/test_lazy.py."""


def edit_before_engine(folder: Path) -> None:
    """Rank function: under ZeRO-3 a model is whole until its engine is made, as by default."""
    DistributedInterface()
    folder = folder / "UNet2DConditionModel"
    alive = HfDeepSpeedConfig(Z3)
    assert_failure_is_known(folder)
    for script in SCRIPTS:
        results = []
        for does_install in (False, True):
            if does_install:
                install()
            torch.manual_seed(0)
            model = diffusers.UNet2DConditionModel.from_pretrained(folder)
            seen = [edit(model, folder) for edit in script]
            model = seen[-1] if isinstance(seen[-1], nn.Module) else model
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine, *_ = deepspeed.initialize(model=model, config={**Z3, **TAKES_ANY}, optimizer=optimizer)
            uninstall()
            assert all(hasattr(parameter, "ds_id") for parameter in engine.module.parameters())
            results.append((seen, whole_tensors(engine.module)))
        (seen, default), (seen_here, ours) = results
        assert isinstance(seen[-1], nn.Module) or seen == seen_here, script
        assert default.keys() == ours.keys(), script
        assert not [name for name in default if not torch.equal(default[name], ours[name])], script
    del alive


def assert_failure_is_known(folder: Path) -> None:
    """Assert that a read that fails on one rank is an error on all. Collective."""

    def fail(*_: Any) -> None:
        raise OSError("the disk is gone")

    install()
    model = diffusers.UNet2DConditionModel.from_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(LazyReader, "fill", fail)
        with pytest.raises(RankError, match="rank 1: OSError: the disk is gone"):
            deepspeed.initialize(model=model, config=Z3)
    uninstall()


TAKES_ANY = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


@pytest.mark.parametrize("act", [load_by_name, load_in_script, edit_before_engine, train])
def test_values_and_files_are_those_of_diffusers(act: Any, tmp_path: Path) -> None:
    write(tmp_path)
    answers = run_ranks(act, tmp_path, timeout_s=300)
    for rank, read_bytes in enumerate(answers if act is load_by_name else ()):
        of_rank: Any = {"rank": rank, "world_size": 2, "dtype": torch.bfloat16}
        plans = [plan_rank(tmp_path / name, sharding=(2,), **of_rank) for name in MODELS]
        assert [plan.costs.read_bytes for plan in plans] == read_bytes
