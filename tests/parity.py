"""Compares a model that lowmem_load loaded with an ordinary load of the same checkpoint, on the rank that calls it.

What a rank must keep is taken from DeepSpeed: its `zero.Init` partitions copies of the ordinary parameters.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn

from lowmem_load import LoadReport, get_load_report, load_model

BF16 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
FP32 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
"""Torch's: DeepSpeed would compile its own first."""


def losses_of_engine(model: nn.Module, ds_config: dict[str, Any], steps: int = 3) -> list[float]:
    """Makes an engine of a model, and returns the losses of some steps on this rank."""
    import deepspeed

    torch.manual_seed(0)
    zero = {"reduce_bucket_size": 100_000, **ds_config["zero_optimization"]}  # the default takes a second to touch
    engine, *_ = deepspeed.initialize(model=model.train(), config={**ADAM, **ds_config, "zero_optimization": zero})
    return train(engine, steps)


def train(engine: Any, steps: int) -> list[float]:
    """Returns the losses of some steps. Ranks of even and of odd numbers have tokens of their own, always the same."""
    losses = []
    seed = torch.distributed.get_rank() % 2
    tokens = torch.randint(3, 97, (2, 10), generator=torch.Generator().manual_seed(seed)).to(engine.device)
    for _ in range(steps):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def assert_loads_alike(
    path: str,
    ds_config: dict[str, Any],
    auto_class: str | None,
    dtype: torch.dtype,
    from_pretrained_kwargs: dict[str, Any] | None = None,
    *,
    name: str = "",
    **load_kwargs: Any,
) -> LoadReport:
    """Loads `path`, or what `name` stands for, and loads it ordinarily; returns the report of our load.

    All ranks must call it.
    """
    kwargs = from_pretrained_kwargs or {}
    torch.manual_seed(int(os.environ["RANK"]))  # ranks of a training job have seeds of their own; rank 0's counts
    model = load_model(name or path, ds_config, auto_class=auto_class, **kwargs, **load_kwargs)
    cls = getattr(transformers, auto_class or transformers.AutoConfig.from_pretrained(path).architectures[0])
    torch.manual_seed(0)
    reference, info = cls.from_pretrained(path, dtype=dtype, output_loading_info=True, **kwargs)
    report = get_load_report(model)
    case = f"{cls.__name__} from {name or path}"
    assert differences(model, reference) == [], case
    for kind, keys in report.loading_info.items():
        assert sorted(map(str, keys)) == sorted(map(str, info[kind])), (case, kind)
    assert not name or model.config.name_or_path == name
    return report


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], case: Any = "") -> None:
    """Asserts that tensors of equal names are equal, bit for bit."""
    assert sorted(found) == sorted(wanted), case
    for name, value in wanted.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), (case, name)
        ours, theirs = (each.detach().reshape(-1).view(torch.uint8) for each in (found[name], value))
        assert torch.equal(ours, theirs), (case, name)


def differences(model: nn.Module, reference: nn.Module, group: Any = None) -> list[str]:
    """Returns what differs between our model and an ordinary model: empty when nothing does.

    Args:
        model: partitioned.
        reference: whole; stays as it is.
        group: the ranks among which `model` is partitioned; all by default. They need not call this together.
    """
    found: list[str] = []
    ours = dict(model.named_parameters(remove_duplicate=False))
    ordinary = dict(reference.named_parameters(remove_duplicate=False))
    if list(ours) != list(ordinary):
        found.append(f"parameter names: {set(ours) ^ set(ordinary) or 'order'}")
    default = _Default(group)
    for name, parameter in ours.items():
        if name in ordinary:
            found += _parameter_differences(name, parameter, ordinary[name], default)
    if _ties(ours) != _ties(ordinary):
        found.append(f"ties: {_ties(ours)} instead of {_ties(ordinary)}")
    found += _buffer_differences(dict(model.named_buffers()), dict(reference.named_buffers()))
    for attribute in ("training", "config.dtype", "config._attn_implementation", "generation_config"):
        values = [_attribute(owner, attribute) for owner in (model, reference)]
        if str(values[0]) != str(values[1]):
            found.append(f"{attribute}: {values[0]} instead of {values[1]}")
    return found


class _Default:
    """Partitions copies of parameters as DeepSpeed does, but for the broadcast from rank 0."""

    def __init__(self, group: Any) -> None:
        import deepspeed

        self._init = deepspeed.zero.Init(data_parallel_group=group)

    def partitioned(self, parameter: torch.Tensor) -> nn.Parameter:
        """Returns a copy of `parameter` that is partitioned; the padding of its `ds_tensor` is NaN."""
        copy = nn.Parameter(parameter.detach().clone(), requires_grad=False)
        self._init._convert_to_deepspeed_param(copy)
        with _empty_is_nan():
            copy.partition()
        return copy


@contextmanager
def _empty_is_nan() -> Iterator[None]:
    """Has torch.empty fill its memory with NaN: what DeepSpeed copies nothing into shows as that."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _parameter_differences(name: str, loaded: nn.Parameter, ordinary: nn.Parameter, default: _Default) -> list[str]:
    found = []
    if loaded.ds_tensor.dtype != ordinary.dtype:
        found.append(f"{name}: dtype {loaded.ds_tensor.dtype} instead of {ordinary.dtype}")
    expected = default.partitioned(ordinary.to(loaded.ds_tensor.dtype))
    ours, theirs = loaded.ds_tensor.cpu(), expected.ds_tensor.cpu()
    owned = theirs.numel() - int(theirs.isnan().sum())  # padding comes last
    if tuple(loaded.ds_shape) != tuple(expected.ds_shape):
        found.append(f"{name}: shape {tuple(loaded.ds_shape)} instead of {tuple(expected.ds_shape)}")
    elif ours.shape != theirs.shape:
        found.append(f"{name}: partition of {ours.numel()} elements instead of {theirs.numel()}")
    elif not _same_bytes(ours[:owned], theirs[:owned]):
        found.append(f"{name}: values differ")
    elif ours[owned:].any():
        found.append(f"{name}: padding is not zero")
    sizes = [(p.ds_numel, p.ds_numel_aligned, p.ds_tensor.ds_numel) for p in (loaded, expected)]
    if sizes[0] != sizes[1]:
        found.append(f"{name}: {sizes[0]} elements in all, with padding, and here, instead of {sizes[1]}")
    if loaded.requires_grad != ordinary.requires_grad:
        found.append(f"{name}: requires_grad {loaded.requires_grad}")
    if loaded.numel() != 0:
        found.append(f"{name}: {loaded.numel()} elements are allocated in addition to the partition")
    return found


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.cpu().contiguous().view(torch.uint8), right.cpu().contiguous().view(torch.uint8))


def _ties(parameters: dict[str, nn.Parameter]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        groups.setdefault(id(parameter), []).append(name)
    return sorted(names for names in groups.values() if len(names) > 1)


def _buffer_differences(ours: dict[str, torch.Tensor], ordinary: dict[str, torch.Tensor]) -> list[str]:
    if ours.keys() != ordinary.keys():
        return [f"buffer names: {ours.keys() ^ ordinary.keys()}"]
    found = []
    for name, buffer in ours.items():
        other = ordinary[name]
        if buffer.dtype != other.dtype or buffer.shape != other.shape or type(buffer) is not torch.Tensor:
            found.append(f"buffer {name}: {buffer.dtype} {tuple(buffer.shape)} {type(buffer).__name__}")
        elif not _same_bytes(buffer.cpu().reshape(-1), other.reshape(-1)):
            found.append(f"buffer {name}: values differ")
    return found


def _attribute(owner: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        owner = getattr(owner, name, None)
    return owner
