"""accelerate's FSDP2 under `install()`: unchanged calls, without a full copy on any rank and without a broadcast."""

import contextlib
import copy
import gc
import os
import sys
import types
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from packaging.version import Version
from torch import nn

import lowmem_load
from lowmem_load import CheckpointError, FallbackWarning, RankError, UnsupportedError
from lowmem_load.distributed.side_group import SideGroup
from lowmem_load.engines.mesh import local_tensor
from lowmem_load.integrations import accelerate
from lowmem_load.load import lazy as lazy_module
from lowmem_load.models.active import IS_LOADING
from lowmem_load.replaced import holding
from lowmem_load.symbolic.lazy import LazyTensor, is_unread
from tests import builders
from tests.model_digest import differing, whole_tensors
from tests.multi_rank.test_load_into import losses, start
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")

PARTS_TIED = Version(version("accelerate")) < Version("1.15")
"""accelerate then made two parameters of tied ones in fsdp2_prepare_model; behind `install()` they stay tied."""

ENVIRONMENT = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"
"""The variable that the launcher sets, and by which the default loader loads."""


def prepare(
    model: nn.Module,
    *,
    efficient: bool,
    mixed_precision: str = "no",
    checkpointed: bool = False,
    ignored: str | None = None,
) -> nn.Module:
    """What `Accelerator.prepare` does with a model. accelerate itself chooses no FSDP on CPU ranks."""
    import accelerate.utils.fsdp_utils as fsdp_utils

    PartialState(cpu=True)  # for accelerate's logger
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=efficient,
        auto_wrap_policy="transformer_based_wrap",
        ignored_modules=ignored,
    )
    accelerator = types.SimpleNamespace(
        state=types.SimpleNamespace(fsdp_plugin=plugin),
        device=torch.device("cpu"),
        mixed_precision=mixed_precision,
        is_main_process=torch.distributed.get_rank() == 0,
        torch_device_mesh=None,
    )
    if checkpointed:  # `Accelerator.prepare` does so before
        plugin.set_auto_wrap_policy(model)
        model = fsdp_utils.fsdp2_apply_ac(accelerator, model)
    return fsdp_utils.fsdp2_prepare_model(accelerator, model)


def from_files(path: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def with_missing_head(path: str) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification.from_pretrained(path, dtype=torch.bfloat16, num_labels=3)


def with_own_seed(path: str) -> nn.Module:
    """As after `set_seed(..., device_specific=True)`: what is drawn differs between ranks."""
    torch.manual_seed(torch.distributed.get_rank())
    return transformers.LlamaForSequenceClassification.from_pretrained(path, dtype=torch.bfloat16, num_labels=3)


def resized(path: str) -> nn.Module:
    model = from_files(path)
    model.generation_config.eos_token_id = 3
    model.resize_token_embeddings(140)
    return model


def changed(path: str) -> nn.Module:
    """Changes that were lost, or errors, when such a model had no values."""
    model = from_files(path)
    model.lm_head.weight.data.mul_(2)
    model.model.norm.weight.data.normal_()
    nn.init.zeros_(model.model.layers[0].mlp.up_proj.weight)
    model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})
    model.norms = [parameter.norm().item() for parameter in model.parameters()]
    return model


class ValueHead(nn.Module):
    """What TRL and others put around a model: heads by its device, by `ones_like`, and a buffer."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._no_split_modules = base._no_split_modules
        self.base = base
        self.head = nn.Linear(base.config.hidden_size, 1).to(base.device)
        self.scale = nn.ParameterList([torch.ones_like(base.lm_head.weight[:2])])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        out = self.base(input_ids=input_ids, labels=labels, output_hidden_states=True)
        values = self.head(out.hidden_states[-1].to(self.head.weight.dtype)).float()
        return types.SimpleNamespace(loss=out.loss + (values * self.scale[0].float().mean()).mean())


def run_on_one_rank(path: str) -> nn.Module:
    model = from_files(path)
    if torch.distributed.get_rank() == 0:
        model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
    return model


def materialized(path: str) -> nn.Module:
    """axolotl gives memory to what is on meta, on all ranks where some parameters are frozen."""
    model = from_files(path)
    sys.modules["axolotl.train"].materialize_trainable_meta_params(model)
    return model


def adapted(path: str, **kwargs: Any) -> Any:
    import peft

    return peft.get_peft_model(from_files(path), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **kwargs))


KINDS: dict[str, Callable[[str], nn.Module]] = {
    "plain": from_files,
    "checkpointed": from_files,
    "ignored": from_files,
    "missing head": with_missing_head,
    "missing head, own seeds": with_own_seed,
    "axolotl": materialized,
    "run on one rank": run_on_one_rank,
    "changed": changed,
    "copied": lambda path: copy.deepcopy(from_files(path)),
    "value head": lambda path: ValueHead(from_files(path)),
    "resized": resized,
    "lora, head": lambda path: adapted(path, modules_to_save=["lm_head", "embed_tokens"]),
    "dora": lambda path: adapted(path, use_dora=True),
}
"""What scripts do to a model before accelerate shards it. tests/unit/test_lazy.py has more, without sharding."""

NOT_EFFICIENT = ("plain", "ignored", "missing head", "run on one rank", "value head", "lora, head")
"""What is loaded without efficient loading, too: what lies in memory, or is drawn, on other ranks than the first."""


def give_memory(model: nn.Module) -> None:
    """axolotl's function `materialize_trainable_meta_params`, in short."""
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            if each.is_meta:
                setattr(module, name, nn.Parameter(torch.zeros_like(each, device="cpu")))


def losses_or_error(model: nn.Module) -> list[float] | str:
    """Losses of some steps; the error where torch cannot train such a model, with or without lowmem_load."""
    try:
        return losses(model, 3)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def compare(path: str, kinds: list[str]) -> None:
    """Rank function: the default load and ours, then training."""
    start()
    sys.modules["axolotl.train"] = types.ModuleType("axolotl.train")
    sys.modules["axolotl.train"].materialize_trainable_meta_params = give_memory  # type: ignore[attr-defined]
    warnings.simplefilter("error", FallbackWarning)
    cases = [(kind, efficient) for kind in kinds for efficient in (True, False) if efficient or kind in NOT_EFFICIENT]
    for kind, efficient in cases:
        gc.collect()  # accelerate's functions stay replaced on a rank for as long as it has a lazy model
        os.environ[EFFICIENT] = str(efficient)
        precision = "no" if kind in ("lora, head", "dora") else "bf16"
        how: Any = {"efficient": efficient, "mixed_precision": precision, "checkpointed": kind == "checkpointed"}
        how["ignored"] = "lm_head" if kind == "ignored" else None
        default = prepare(KINDS[kind](path), **how)
        lowmem_load.install()
        before = KINDS[kind](path)
        num_lazy = sum(map(is_unread, before.parameters()))
        has_run = kind == "run on one rank" and torch.distributed.get_rank() == 0
        assert (num_lazy == 0) == has_run, kind
        ours = prepare(before, **how)
        lowmem_load.integrations.install.uninstall()
        is_lazy = any(isinstance(local_tensor(each), LazyTensor) for each in ours.parameters())
        assert is_lazy == (kind == "ignored" and not efficient), kind  # a forward reads what nobody shards
        expected, found = whole_tensors(default), whole_tensors(ours)
        parted = expected.keys() - found.keys()
        assert found.keys() <= expected.keys()
        assert not parted or (parted == {"lm_head.weight"} and PARTS_TIED), parted
        for name, tensor in found.items():
            assert tensor.dtype == expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), (name, kind, efficient)
        if kind == "checkpointed":
            assert any("_checkpoint_wrapped_module" in name for name, _ in ours.named_modules())
        if kind == "resized":
            assert ours.generation_config.eos_token_id == 3
        if "missing head" not in kind:
            assert losses_or_error(ours) == losses_or_error(default), kind


def test_what_accelerate_prepares_equals_the_default(checkpoints: Path) -> None:
    run_ranks(compare, str(builders.tiny_llama(checkpoints)), list(KINDS), env=ENVIRONMENT, timeout_s=400)


def test_tied_models_equal_the_default(checkpoints: Path) -> None:
    run_ranks(
        compare, str(builders.tiny_qwen2_tied(checkpoints)), ["copied", "resized"], env=ENVIRONMENT, timeout_s=240
    )


# -- scripts, one after the other on the same ranks --------------------------------------------------------------------


def with_moved_names(path: str) -> None:
    """Where accelerate has moved its names, its broadcast from rank 0 gives the same values."""
    os.environ[EFFICIENT] = "True"
    default = prepare(from_files(path), efficient=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerate, "HANDLERS", {})
        lowmem_load.install()
        ours = prepare(from_files(path), efficient=True)
    lowmem_load.integrations.install.uninstall()
    assert differing(ours, default) == []


class Wrapper(nn.Module):
    """A model with state of its own next to it. On meta it has none, but for what accelerate keeps."""

    def __init__(self, base: nn.Module, device: str) -> None:
        super().__init__()
        self._no_split_modules = base._no_split_modules
        self.base = base
        self.register_buffer("mean", torch.full((2, 3), 1.5).T, persistent=False)
        self.register_buffer("count", torch.tensor(7, device=device))
        self.register_buffer("again", self.count)


def next_to_others(path: str) -> None:
    """Buffers next to the model keep rank 0's values, and a head needs some: on meta it has none."""
    lowmem_load.install()
    device = "cpu" if torch.distributed.get_rank() == 0 else "meta"
    ours = prepare(Wrapper(from_files(path), device), efficient=True)
    headed = Wrapper(from_files(path), "cpu")
    headed.head = nn.Linear(4, 2, device="meta")
    with pytest.raises(UnsupportedError, match=r"FSDPWrapper: head\.weight, head\.bias have no values"):
        prepare(headed, efficient=True)
    lowmem_load.integrations.install.uninstall()
    assert torch.equal(ours.mean, torch.full((3, 2), 1.5))
    assert ours.count.item() == ours.again.item() == 7
    expected = from_files(path).model.rotary_emb.inv_freq
    assert torch.equal(ours.base.model.rotary_emb.inv_freq, expected)


def for_trainer(path: str) -> None:
    """Nothing but TrainingArguments asks for FSDP2."""
    del os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_VERSION"]
    lowmem_load.install()
    arguments = transformers.TrainingArguments("out", fsdp=True, fsdp_config={"fsdp_version": 2}, use_cpu=True)
    assert all(map(is_unread, from_files(path).parameters()))
    assert arguments.fsdp_plugin_args["fsdp_version"] == 2


def as_trl(path: str) -> None:
    """TRL shards a reference model by `fully_shard` itself."""
    os.environ[EFFICIENT] = "false"
    seen: list[Any] = []
    lowmem_load.install(on_load=seen.append)
    ours = from_files(path)
    assert seen == []
    from torch.distributed.fsdp import fully_shard  # as TRL does, in a function

    fully_shard(ours)
    assert seen == []
    lowmem_load.integrations.install.uninstall()
    assert differing(ours, from_files(path)) == []
    ours(torch.tensor([[1, 2]]))
    assert seen == [lowmem_load.get_load_report(ours)]


def keep_identity(path: str) -> None:
    """Whoever holds a parameter of a lazy model holds that of the model, whatever fills it."""
    import peft

    os.environ[EFFICIENT] = "false"
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    dora = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    fills: dict[str, Callable[[nn.Module], object]] = {
        "moved": lambda model: model.to("cpu"),
        "run": lambda model: model(torch.tensor([[1, 2]])),
        "adapter": lambda model: peft.get_peft_model(model, lora),
        "adapter that needs weights": lambda model: peft.get_peft_model(model, dora),
        "sharded, one ignored": lambda model: torch.distributed.fsdp.fully_shard(
            model, ignored_params={model.lm_head.weight}
        ),
    }
    lowmem_load.install()
    for name, fill in fills.items():
        model: Any = from_files(path)
        head, counts = model.lm_head.weight, [0, 0]
        head.learning_rate = 3
        head.register_hook(lambda _, counts=counts: counts.__setitem__(0, counts[0] + 1))
        head.register_post_accumulate_grad_hook(lambda _, counts=counts: counts.__setitem__(1, counts[1] + 1))
        before = dict(model.named_parameters())
        fill(model)
        assert not head.is_meta, name
        assert head.learning_rate == 3
        if "adapter" not in name:  # PEFT freezes it
            (head.sum() * 2).backward()
            assert (head.grad == 2).all() and counts == [1, 1], name
        if name == "sharded, one ignored":
            before = {"lm_head.weight": head}
        if "adapter" not in name:  # there the names are others
            after = dict(model.named_parameters())
            assert [key for key, parameter in before.items() if after[key] is not parameter] == [], name


def train_early(path: str) -> None:
    """An optimizer that is made before the model is moved, run and prepared trains it as by default."""

    def train(fill: Callable[[nn.Module], object], *, shards: bool) -> list[float]:
        import accelerate.utils.fsdp_utils as fsdp_utils

        model = from_files(path)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        fill(model)
        if shards:  # as `Accelerator.prepare` does with an optimizer
            before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
            for group in optimizer.param_groups:
                group["params"] = [types.SimpleNamespace(data_ptr=each.data_ptr()) for each in group["params"]]
            model = prepare(model, efficient=False)
            after = dict(model.named_parameters())
            fsdp_utils.fsdp2_switch_optimizer_parameters(
                optimizer, {address: after[name] for name, address in before.items()}
            )
        return losses(model, 3, optimizer)

    os.environ[EFFICIENT] = "false"
    fills: list[Callable[[nn.Module], object]] = [
        lambda model: model.to("cpu"),
        lambda model: model(torch.tensor([[1, 2]])),
    ]
    for shards in (False, True):
        for fill in fills:
            expected = train(fill, shards=shards)
            lowmem_load.install()
            ours = train(fill, shards=shards)
            lowmem_load.integrations.install.uninstall()
            assert ours == expected and ours[-1] < ours[0], (shards, ours, expected)


def draw_missing(path: str) -> None:
    """With efficient loading the default loader draws a missing head on the first rank of a node alone."""
    if Version(transformers.__version__) < Version("5.13"):
        return  # draws there are this release's own
    for efficient in (True, False):
        os.environ[EFFICIENT] = str(efficient)
        with_missing_head(path)
        expected = torch.rand(3)
        lowmem_load.install()
        pending = with_missing_head(path)
        ours = torch.rand(3)
        lowmem_load.integrations.install.uninstall()
        assert any(map(is_unread, pending.parameters()))
        assert torch.equal(ours, expected), efficient


def fail_to_send(path: str) -> None:
    """The first rank cannot read a weight that the script has changed, or another cannot receive it."""
    os.environ[EFFICIENT] = "True"
    lowmem_load.install()
    faults = (
        (OSError(5, "Input/output error"), lazy_module, "values_of"),
        (MemoryError("no memory"), SideGroup, "broadcast"),
    )
    for failing, (error, owner, function) in enumerate(faults):
        model = from_files(path)
        model.lm_head.weight.data.mul_(2)

        def fails(*_: Any, error: BaseException = error, **__: Any) -> Any:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            if torch.distributed.get_rank() == failing:
                patch.setattr(owner, function, fails)
            with pytest.raises(RankError, match=r"(reading|sending) what was changed") as caught:
                prepare(model, efficient=True)
        assert list(caught.value.failures) == [failing]
        total = torch.ones(1)
        torch.distributed.all_reduce(total)  # the group has no message of another's left
        assert total == 2


SCRIPTS: tuple[Callable[[str], None], ...] = (
    *(with_moved_names, next_to_others, for_trainer, as_trl, keep_identity, train_early, draw_missing),
    fail_to_send,
)


def run_scripts(path: str) -> None:
    """Rank function: what a script installs or sets in the environment ends with it."""
    start()
    for script in SCRIPTS:
        with mock.patch.dict(os.environ):
            script(path)
        lowmem_load.integrations.install.uninstall()
        gc.collect()


def test_scripts_under_install_do_as_by_default(checkpoints: Path) -> None:
    run_ranks(run_scripts, str(builders.tiny_llama(checkpoints)), env=ENVIRONMENT, timeout_s=300)


# -- ranks that do not load alike ---------------------------------------------------------------------------------


def empty_on_others(path: str, _: str) -> nn.Module:
    import accelerate

    with contextlib.nullcontext() if torch.distributed.get_rank() == 0 else accelerate.init_empty_weights():
        return from_files(path)


def own_teacher(path: str, other: str) -> nn.Module:
    from_files([path, other][torch.distributed.get_rank()])(torch.tensor([[1, 2]]))
    return from_files(path)


def one_at_a_time(path: str, _: str) -> nn.Module:
    models = []
    for turn in range(2):
        if torch.distributed.get_rank() == turn:
            models.append(from_files(path))
        torch.distributed.barrier()
    return models[0]


def judge_on_first(path: str, other: str) -> nn.Module:
    if torch.distributed.get_rank() == 0:
        from_files(other)(torch.tensor([[1, 2]]))
    torch.distributed.barrier()
    return from_files(path)


def default_on_one(path: str, _: str) -> nn.Module:
    with holding(IS_LOADING, True) if torch.distributed.get_rank() == 0 else contextlib.nullcontext():
        return from_files(path)


def load_unlike(path: str, other: str) -> None:
    """Rank function: programs whose ranks do not load alike. A load is local, and ranks agree as they shard."""
    start()
    os.environ[EFFICIENT] = "True"
    default = prepare(from_files(path), efficient=True)
    lowmem_load.install()
    for make in (empty_on_others, own_teacher, one_at_a_time, judge_on_first, default_on_one):
        assert differing(prepare(make(path, other), efficient=True), default) == []
    rank = torch.distributed.get_rank()
    with pytest.raises(CheckpointError, match="the ranks have 2 different files"):
        prepare(from_files([path, other][rank]), efficient=True)
    model = from_files(path)
    weight = model.lm_head.weight
    weight.data = torch.cat([weight.data[rank : rank + 1], weight.data[1:]])  # cut alike, at another place on each rank
    with pytest.raises(RankError, match="weights that are not read yet"):
        prepare(model, efficient=True)


def test_ranks_need_not_load_alike(checkpoints: Path, tmp_path: Path) -> None:
    other = transformers.LlamaForCausalLM.from_pretrained(path := str(builders.tiny_llama(checkpoints)))
    other.lm_head.weight.data.mul_(2)
    other.save_pretrained(tmp_path)
    env = {**ENVIRONMENT, "LOWMEM_LOAD_SILENCE_S": "30"}
    run_ranks(load_unlike, path, str(tmp_path), env=env, timeout_s=150)
