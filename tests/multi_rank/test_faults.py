"""What fails on one rank before ranks have agreed on anything is an error on all of them, within seconds."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM

from lowmem_load import RankError, initialize_partial, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.integrations.install import streaming
from tests import builders
from tests.parity import BF16
from tests.ranks import run_ranks

LIMIT_S = 10.0


class Unspeakable(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raising(error: BaseException) -> Callable[..., Any]:
    def predicate(*_: Any) -> bool:
        raise error

    return predicate


def raises_in_time(kind: type[BaseException], text: str, work: Callable[[], Any], case: str = "") -> None:
    start = time.perf_counter()
    with pytest.raises(kind, match=text) as caught:
        work()
    assert type(caught.value) is kind, case
    assert time.perf_counter() - start < LIMIT_S, case


def fail_on_the_last_rank(path: str) -> None:
    """Each fault on the last rank; all ranks raise, and load the same model afterwards."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def partitioned(error: BaseException) -> None:
        load_model(path, BF16, partition=raising(error) if last else lambda name, _: name == "model")

    def ours(ds_config: dict[str, Any], **kwargs: Any) -> None:
        with streaming(ds_config):
            AutoModelForCausalLM.from_pretrained(path, **kwargs)

    faults: dict[str, tuple[Callable[[], Any], type[BaseException], str]] = {
        "name": (lambda: load_model(None if last else path, BF16), RankError, "name: expected a local folder"),
        "device_map": (lambda: ours(BF16, **({"device_map": "cpu"} if last else {})), RankError, "device_map"),
        "an error without text": (
            lambda: partitioned(Unspeakable()),
            RankError,
            r"Unspeakable \(its text cannot be had\)",
        ),
        "an interrupt": (
            lambda: partitioned(KeyboardInterrupt()),
            KeyboardInterrupt if last else RankError,
            "" if last else "KeyboardInterrupt",
        ),
    }
    for name, (load, kind, text) in faults.items():
        raises_in_time(kind, text, load, name)
        load_model(path, BF16)


def leave_alone(path: str) -> None:
    """The last rank goes away on its own; the others hear of it, and all load the same afterwards."""
    DistributedInterface()
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    everyone = dist.new_group()

    def expect(kind: type[BaseException], text: str, work: Callable[[], Any]) -> None:
        raises_in_time(kind, text, work)
        if kind is not RankError:  # at once it would be in time for the others' load, and no harm done
            time.sleep(2.5)
        load_model(path, BF16, data_parallel_group=everyone)
        load_model(path, BF16)

    def between_loads() -> None:
        if last:
            with streaming(BF16):
                raise LookupError("before any load")
        with streaming(BF16):
            AutoModelForCausalLM.from_pretrained(path)

    expect(LookupError if last else RankError, "before any load", between_loads)

    def trained() -> None:
        model = load_model(path, BF16, partition="model")
        hooks = [len(module._forward_pre_hooks) for module in model.modules()]
        try:
            initialize_partial(
                model,
                # torch's: DeepSpeed would compile its own first, which takes half a minute
                {**BF16, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}},
                lr_scheduler=raising(ValueError("no rate")) if last else None,
            )
        finally:
            assert isinstance(model, nn.Module)
            assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]

    expect(RankError, "no rate", trained)


def fail(path: str) -> None:
    fail_on_the_last_rank(path)
    leave_alone(path)


def test_what_fails_on_one_rank_fails_on_all_and_who_goes_away_is_named(checkpoints: Path) -> None:
    run_ranks(fail, str(builders.tiny_llama(checkpoints)), world_size=3, timeout_s=120)
