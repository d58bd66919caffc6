"""load_checkpoint: a run that DeepSpeed has saved goes on, on as many ranks as before or on others.

Starting ranks is slow, so the test starts two, once, and has what three have saved made for them. Runs that really go
on elsewhere are run by `-m release`.
"""

import gc
import os
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lowmem_load import consolidate, load_checkpoint, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import CheckpointError, ConfigError, RankError, UnsupportedError
from tests import builders
from tests.multi_rank import test_partial_training as partial
from tests.multi_rank.test_modes import is_compiled
from tests.parity import assert_equal
from tests.ranks import run_ranks
from tests.storage import fail_once
from tests.zero_checkpoint import save_zero3

SAMPLES = 12
"""Of one step, of all ranks together."""

ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}}
CPU_ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 10}}

CASES: dict[str, dict[str, Any]] = {
    "bf16": BF16,
    "lora": {**BF16, "lora": True},
    "fp32": {},
    "fp16": FP16,
    "large": BF16,
    "nvme": {**BF16, **CPU_ADAM, "nvme": True},
}
"""What is saved: sections of the ds_config, and whether only a LoRA is trained, or the optimizer is on nvme, to which
only what is large goes."""

IN_THE_TEST = ("bf16",)
"""The others, and other numbers of ranks, are run by `-m release`."""

KEYS = ("fp32", "exp_avg", "exp_avg_sq")


def config(case: Mapping[str, Any], **zero: Any) -> dict[str, Any]:
    """Return a ds_config for the ranks that there are."""
    stage_3 = {"stage": 3, "sub_group_size": 3000, "stage3_param_persistence_threshold": 40, **zero}
    micro = {"train_micro_batch_size_per_gpu": SAMPLES // _world_size()}
    sections = {key: section for key, section in case.items() if key not in ("lora", "nvme")}
    return {"zero_optimization": stage_3, **micro, **ADAM, **WARMUP, **sections}


def on_nvme(swap: str) -> dict[str, Any]:
    """Return settings of ZeRO that offload to a folder."""
    nvme = {"device": "nvme", "nvme_path": swap, "pin_memory": False, "buffer_count": 4}
    return {"offload_optimizer": nvme, "offload_param": {**nvme, "buffer_size": 1_400_000}, "sub_group_size": 1_000_000}


def offload_of(case: Mapping[str, Any], swap: str) -> dict[str, Any]:
    """Return settings of ZeRO of a case; each engine needs a folder of its own."""
    return on_nvme(swap) if case.get("nvme") else {}


def cases() -> list[str]:
    """Return the cases that this machine can run."""
    return [name for name, case in CASES.items() if not case.get("nvme") or is_compiled("async_io")]


def _world_size() -> int:
    return DistributedInterface().world_size


def make_engine(path: str, case: Mapping[str, Any], ds_config: dict[str, Any], *, spoilt: bool = False) -> Any:
    """Return an engine of a model of which the norms are frozen, or of which only a LoRA is trained.

    Of one that is spoilt every weight is another, so that what was not loaded shows.
    """
    if "fp16" in case:
        get_accelerator().is_fp16_supported = lambda: True  # torch's CPU knows it
    model: Any = load_model(path, ds_config)
    if case.get("lora"):
        import peft

        torch.manual_seed(5)
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.requires_grad_(False)
    engine = deepspeed.initialize(model=model, config=ds_config)[0]
    if spoilt:
        for parameter in engine.module.parameters():
            parameter.ds_tensor.data.add_(1.0)
    return engine


def train(engine: Any, first: int, last: int) -> list[float]:
    """Return the losses of some steps over all ranks' samples, which do not depend on how many ranks there are."""
    losses = []
    each = SAMPLES // dist.get_world_size()
    for step in range(first, last):
        drawn = torch.randint(0, 100, (SAMPLES, 10), generator=torch.Generator().manual_seed(step % 2))
        tokens = drawn[dist.get_rank() * each :][:each].to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        gathered = [torch.zeros((), dtype=torch.float32) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, loss.detach().float().cpu())
        losses.append(float(sum(gathered)) / len(gathered))
    return losses


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    """Return all values of the optimizer and all frozen ones, gathered by DeepSpeed itself."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            found[f"{name} fp32"] = safe_get_full_fp32_param(parameter).view(shape).clone()
            for key in KEYS[1:]:
                state = safe_get_full_optimizer_state(parameter, key)
                found[f"{name} {key}"] = state.view(shape).clone()
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().clone()
    return found


# -- what two ranks save ---------------------------------------------------------------------------------------------


def save_and_go_on(paths: dict[str, str], folder: str, names: Sequence[str]) -> dict[str, list[float]]:
    """Rank function: saves, trains on, and goes on from what was saved as the run that was not interrupted."""
    losses: dict[str, list[float]] = {}
    for name in names:
        case = CASES[name]
        path = paths.get(name, paths["bf16"])
        engine = make_engine(path, case, config(case, **offload_of(case, f"{folder}/swap")))
        train(engine, 0, 3)
        place = f"{folder}/{name}"
        engine.save_checkpoint(place, client_state={"seen": [1, {"two": 2}], "rank": dist.get_rank()})
        state = whole_state(engine)
        if dist.get_rank() == 0:
            torch.save(state, f"{place}/whole.pt")
        scaler = dict(vars(engine.optimizer.loss_scaler))
        losses[name] = train(engine, 3, 6)
        assert case.get("lora") or losses[name][-1] < losses[name][0] - 0.005, losses[name]  # what moments are for
        again = offload_of(case, f"{folder}/swap_again")
        engine = make_engine(path, case, config(case, **again), spoilt=not again)
        found, client_state = load_checkpoint(engine, place)
        assert found == f"{place}/global_step3" and client_state["seen"] == [1, {"two": 2}]
        assert client_state["rank"] == dist.get_rank()
        assert (engine.global_steps, engine.global_samples) == (3, 3 * SAMPLES)
        assert_equal(whole_state(engine), state)
        assert vars(engine.optimizer.loss_scaler) == scaler
        assert train(engine, 3, 6) == losses[name]
        if name == "bf16":
            load_checkpoint(engine, place, "global_step3")  # an engine that has stepped goes back
            assert train(engine, 3, 6) == losses[name]
            assert load_checkpoint(engine, f"{folder}/nowhere") == (None, {})
        gc.collect()
    save_partial(paths["partial"], f"{folder}/partial")
    return losses


def save_partial(path: str, place: str) -> None:
    """Save a run of ZeRO-3 on part of a model, and make a model folder of it."""
    engine = partial.make_engine(path, partial.CONFIG)
    partial.train(engine, 0, 2)
    engine.save_checkpoint(place)
    state = engine.consolidated_state_dict()
    if state is not None:
        torch.save(state, f"{place}/whole.pt")
        consolidate(place, f"{place}/made", config=False)
        assert_equal(load_file(f"{place}/made/model.safetensors"), state)
    dist.barrier()
    engine.destroy()


# -- what is made of it, by as many ranks ------------------------------------------------------------------------------


def save_and_resume(paths: dict[str, str], folder: str) -> None:
    """Rank function: all of the test."""
    save_and_go_on(paths, folder, IN_THE_TEST)
    take_what_others_have_saved(paths["bf16"], folder)
    resume_partial(paths["partial"], folder)
    keep_what_each_rank_has(f"{folder}/own")
    refuse(paths["bf16"], folder)


def take_what_others_have_saved(path: str, folder: str) -> None:
    """The same state comes of a checkpoint of three ranks, and what one lacks begins again."""
    state = torch.load(f"{folder}/bf16/whole.pt", weights_only=True)
    names = [name.removesuffix(" fp32") for name in state if name.endswith(" fp32")]
    known = names[: len(names) // 2]
    if dist.get_rank() == 0:
        save_as_three_ranks(Path(folder, "three"), state, names)
        save_as_three_ranks(Path(folder, "less"), state, known)
    dist.barrier()
    offload = CPU_ADAM if is_compiled("cpu_adam") else {}
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    engine = make_engine(path, BF16, {**config(BF16, **zero), **offload}, spoilt=True)
    load_checkpoint(engine, f"{folder}/three")
    assert_equal(whole_state(engine), state)
    train(engine, 3, 4)
    load_checkpoint(engine, f"{folder}/three")
    load_checkpoint(engine, f"{folder}/less", load_module_strict=False)
    zeros = {f"{name} {key}" for name in set(names) - set(known) for key in KEYS[1:]}
    expected = {key: torch.zeros_like(value) if key in zeros else value for key, value in state.items()}
    assert_equal(whole_state(engine), expected)
    steps = [
        int(engine.optimizer.optimizer.state[flat]["step"]) for flat in engine.optimizer.fp32_partitioned_groups_flat
    ]
    assert set(steps) == {0, 3}
    train(engine, 3, 4)


def save_as_three_ranks(folder: Path, state: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    """Save some trained parameters, and all frozen ones, as three ranks would have."""
    values = {key: {name: state[f"{name} {key}"] for name in names} for key in KEYS}
    frozen = {name: value for name, value in state.items() if f"{name} fp32" not in state and " " not in name}
    trained = values.pop("fp32")
    save_zero3(folder, trained, world_size=3, sub_group_size=500, frozen=frozen, moments=values)


def resume_partial(path: str, folder: str) -> None:
    """A run of ZeRO-3 on part of a model goes on."""
    engine = partial.make_engine(path, partial.CONFIG)
    load_checkpoint(engine, f"{folder}/partial")
    state = engine.consolidated_state_dict()
    if state is not None:
        assert_equal(state, torch.load(f"{folder}/partial/whole.pt", weights_only=True))
    partial.train(engine, 2, 3)
    engine.destroy()


class Counting(nn.Module):
    """Has a buffer and an extra state, which ranks may have of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3))
        self.state: dict[str, Any] = {}

    def get_extra_state(self) -> dict[str, Any]:
        return self.state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.state = state


def keep_what_each_rank_has(folder: str) -> None:
    """Buffers and extra states come back as by DeepSpeed's own load.

    Also those of modules that recompute activations, and of a module in two places.
    """
    rank = dist.get_rank()

    def make() -> tuple[Any, list[Counting]]:
        modules = [Counting(), Counting()]
        engine = deepspeed.initialize(
            model=nn.Sequential(modules[0], checkpoint_wrapper(modules[1]), modules[0]), config=config({})
        )[0]
        return engine, modules

    engine, modules = make()
    for number, module in enumerate(modules):
        module.seen.fill_(rank + number + 1)
        module.state = {"calls": rank + number + 10, "scale": torch.full((2,), rank + 0.5)}
    engine.save_checkpoint(folder)
    consolidate(folder, f"{folder}/weights")
    names = {f"{number}.{name}" for number in (0, 1) for name in ("inner.weight", "inner.bias", "seen")}
    assert load_file(f"{folder}/weights/model.safetensors").keys() == names  # shared ones once
    for load in (deepspeed.DeepSpeedEngine.load_checkpoint, load_checkpoint):
        other, modules = make()
        load(other, folder)
        for number, module in enumerate(modules):
            assert module.seen.tolist() == [rank + number + 1] * 3
            assert module.state["calls"] == rank + number + 10 and module.state["scale"].tolist() == [rank + 0.5] * 2


# -- what other ranks make of it --------------------------------------------------------------------------------------


def go_on_elsewhere(paths: dict[str, str], folder: str, expected: dict[str, list[float]], swap: str | None) -> None:
    """Rank function: goes on from each of the folders, with other settings too."""
    path = paths["bf16"]
    for name, case, sections, zero in ways(list(expected), swap):
        ds_config = {**config(case, **zero), **sections}
        engine = make_engine(paths.get(name, path), case, ds_config, spoilt="nvme" not in str(zero))
        load_checkpoint(engine, f"{folder}/{name}")
        assert_equal(whole_state(engine), torch.load(f"{folder}/{name}/whole.pt", weights_only=True))
        losses = train(engine, 3, 6)
        # On 3 ranks the optimizer of 0.19.8 trains otherwise on nvme than on the cpu, also without a checkpoint.
        same = 1 if case.get("nvme") or ("nvme" in str(zero) and dist.get_world_size() == 3) else 3
        assert losses[:same] == pytest.approx(expected[name][:same], rel=1e-4), (name, zero)
        del engine
        gc.collect()
    resume_partial(paths["partial"], folder)


def ways(names: Sequence[str], swap: str | None) -> list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Return how runs go on: folder, case, sections and settings of ZeRO."""
    found: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        (name, CASES[name], {}, {"offload_optimizer": {"device": "cpu"}} if CASES[name].get("nvme") else {})
        for name in names
    ]
    cpu = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu", "pin_memory": False}}
    if is_compiled("cpu_adam"):
        found.append(("bf16", BF16, CPU_ADAM, {**cpu, "sub_group_size": 500}))
    if swap is not None and "large" in names:
        found.append(("large", BF16, CPU_ADAM, on_nvme(swap)))
    return found


def refuse(path: str, folder: str) -> None:
    """What does not go together is an error on all ranks, and leaves the engine as it was."""
    engine = make_engine(path, BF16, config(BF16))
    engine.save_checkpoint(f"{folder}/first")
    before = train(engine, 0, 1), whole_state(engine)
    with pytest.raises(ConfigError, match="before the optimizer's first step"):
        load_checkpoint(engine, f"{folder}/first")
    with pytest.raises(CheckpointError, match=r"another model: missing: base_model.* not in the engine"):
        load_checkpoint(make_engine(path, CASES["lora"], config(BF16)), f"{folder}/bf16", load_optimizer_states=False)
    with pytest.raises(CheckpointError, match="no checkpoint 'global_step7'"):
        load_checkpoint(engine, f"{folder}/bf16", "global_step7")
    with pytest.raises(RankError, match="opening the checkpoint"):  # different ones
        load_checkpoint(engine, f"{folder}/{'three' if dist.get_rank() else 'bf16'}")
    place = Path(folder, "bf16", "global_step3")
    victim = next(place.glob("*rank_1_*optim*"))
    content, times = victim.read_bytes(), victim.stat()
    dist.barrier()
    if dist.get_rank() == 0:
        victim.write_bytes(content[:-1000])
    dist.barrier()
    with pytest.raises(
        CheckpointError, match=r"rank_1_mp_rank_00_optim_states\.pt: ends at byte .* without a zip directory"
    ):
        load_checkpoint(engine, f"{folder}/bf16")
    assert_equal(whole_state(engine), before[1])
    dist.barrier()
    if dist.get_rank() == 0:
        victim.write_bytes(content)
        os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))  # or it would be of a later save on a slow machine
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        from lowmem_load.files.source import LocalFile

        patch.setattr(LocalFile, "read_into", failing_on_rank_1(LocalFile.read_into))
        with pytest.raises(RankError, match="reading the checkpoint"):
            load_checkpoint(engine, f"{folder}/bf16")
    with pytest.raises(ConfigError, match="halfway"):
        engine(input_ids=torch.zeros((1, 4), dtype=torch.int64))
    refuse_what_may_be_overwritten(engine, f"{folder}/bf16")
    with pytest.MonkeyPatch.context() as patch:
        fail_once(patch)
        load_checkpoint(engine, f"{folder}/bf16", load_module_only=True)
    assert engine.global_steps == 1
    resume_by_two_paths(engine, folder)
    train(engine, 3, 4)
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    engine = make_engine(path, BF16, {**config(BF16), **sgd})
    with pytest.raises(ConfigError, match="another optimizer than SGD"):
        load_checkpoint(engine, f"{folder}/bf16")
    with pytest.raises(UnsupportedError, match="plain ZeRO-3"):
        load_checkpoint(torch.nn.Linear(1, 1), f"{folder}/bf16")


def refuse_what_may_be_overwritten(engine: Any, place: str) -> None:
    """Rank 1 fails while storage does not answer rank 0, whose reads may later write into the engine."""
    from lowmem_load import load_checkpoint
    from lowmem_load.files import executor
    from lowmem_load.files.source import LocalFile

    answers, fail, read_into = threading.Event(), failing_on_rank_1(LocalFile.read_into), LocalFile.read_into

    def hanging(source: Any, offset: int, memory: memoryview) -> None:
        if dist.get_rank() == 0 and is_of_weights(source, offset, memory):
            answers.wait(60)
            read_into(source, offset, memory)
        else:
            fail(source, offset, memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "LEAVE_S", 0.5)
        patch.setattr("lowmem_load.resume.load_checkpoint.cores", lambda _: 2)
        with pytest.MonkeyPatch.context() as faulty:
            faulty.setattr(LocalFile, "read_into", hanging)
            with pytest.raises(RankError, match="reading the checkpoint"):
                load_checkpoint(engine, place, load_module_only=True)
        with pytest.raises(RankError, match=r"rank 0: .* cannot be filled, because .* is still reading .*optim_states"):
            load_checkpoint(engine, place, load_module_only=True)
        answers.set()
        load_checkpoint(engine, place, load_module_only=True)


def resume_by_two_paths(engine: Any, folder: str) -> None:
    """Rank 1 has the disk under another path, of which the system does not say that it is a link: a mount."""
    if dist.get_rank() == 0:
        Path(folder, "mounted").symlink_to(".")
        shutil.copytree(f"{folder}/bf16", f"{folder}/another-run", copy_function=shutil.copyfile)
        for path in Path(folder, "another-run").glob("*/*optim*"):  # with other values of equal shapes
            saved = torch.load(path, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"][0]
            values = saved.detach().numpy().tobytes()
            path.write_bytes(path.read_bytes().replace(values, bytes(len(values))))
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os.path, "realpath", os.path.abspath)
        places = [f"{folder}/bf16", f"{folder}/mounted/bf16", f"{folder}/another-run"]
        load_checkpoint(engine, places[dist.get_rank()], load_module_only=True)
        with pytest.raises(CheckpointError, match=r"2 different files of this name.* rank\(s\) 1: .*another-run"):
            load_checkpoint(engine, places[2 * dist.get_rank()], load_module_only=True)
    with pytest.raises(RankError, match=r"rank 1: has strict False, where rank\(s\) 0 have True"):
        load_checkpoint(engine, f"{folder}/bf16", load_module_strict=dist.get_rank() == 0)


def is_of_weights(source: Any, offset: int, memory: memoryview) -> bool:
    """Return whether a read is one of weights: it lies between the pickle and the directory."""
    return memory.nbytes > 100 and 8000 < offset < source.nbytes - 8000


def failing_on_rank_1(read_into: Any) -> Any:
    """Return a `read_into` that fails on rank 1 once weights are read."""

    def failing(source: Any, offset: int, memory: memoryview) -> None:
        if dist.get_rank() == 1 and is_of_weights(source, offset, memory):
            raise CheckpointError(f"{source.path}: cannot be read: broken")
        read_into(source, offset, memory)

    return failing


def checkpoints_of(folder: Path) -> dict[str, str]:
    """Return the models that are trained."""
    large = builders.tiny_llama(folder, hidden_size=128, vocab_size=8192)
    part = builders.tiny_llama(folder, torch.float32)
    odd = builders.tiny_llama(folder, **builders.ODD_SIZES)
    return {"bf16": str(odd), "large": str(large), "nvme": str(large), "partial": str(part)}


def test_a_run_goes_on(checkpoints: Path, tmp_path: Path) -> None:
    paths, folder = checkpoints_of(checkpoints), str(tmp_path)
    run_ranks(save_and_resume, paths, folder, world_size=2, timeout_s=200)


@pytest.mark.release
@pytest.mark.parametrize(("saved_by", "resumed_by"), [(2, 1), (2, 4), (4, 3), (3, 2)])
def test_every_way_to_save_goes_on_elsewhere(tmp_path: Path, saved_by: int, resumed_by: int) -> None:
    paths, folder = checkpoints_of(tmp_path), str(tmp_path)
    losses = run_ranks(save_and_go_on, paths, folder, cases(), world_size=saved_by, timeout_s=300)[0]
    swap = f"{folder}/swap" if is_compiled("async_io") else None
    run_ranks(go_on_elsewhere, paths, folder, losses, swap, world_size=resumed_by, timeout_s=300)
