"""Changes of the weights while they are sent. Buckets from before and after one would be no state of the model."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowmem_load.errors import ConfigError
from lowmem_load.saving.local_shards import LocalShard, is_dtensor, unwrapped


@contextlib.contextmanager
def changes_refused(engine: nn.Module, shards: Sequence[LocalShard]) -> Iterator[Callable[[], None]]:
    """Yield a function that raises ConfigError if something that can be seen has changed the weights since."""
    stepped: list[str] = []
    parameters = {id(shard.tensor) for shard in shards}
    optimizers: set[int] = set()
    if "deepspeed" in sys.modules:
        from lowmem_load.ds.parameters import optimizers_of

        optimizers = {*map(id, optimizers_of(engine, [shard.tensor for shard in shards]))}

    def note(optimizer: Any, *_: Any) -> None:
        trained = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        if id(optimizer) in optimizers or not parameters.isdisjoint(trained):
            stepped.append(type(optimizer).__name__)

    model = unwrapped(engine)
    before = {shard.source.name: (shard.version, shard.address) for shard in shards}

    def changed() -> str:
        if stepped:
            return f"an optimizer ({stepped[0]}) stepped"
        there = {*map(id, model.parameters())}
        for shard in shards:
            # FSDP2 puts other parameters in the place of its DTensors while it computes.
            may_go = is_dtensor(shard.tensor) or not isinstance(shard.tensor, nn.Parameter)
            is_there = may_go or id(shard.tensor) in there
            if not is_there or (shard.version, shard.address) != before[shard.source.name]:
                return f"{shard.source.name} was changed"
        return ""

    def refuse() -> None:
        if what := changed():
            raise ConfigError(
                f"iter_weights: {what} between two buckets, so they would be no state of the model; take all buckets "
                "before the next step"
            )

    handle = register_optimizer_step_post_hook(note)
    try:
        yield refuse
    finally:
        handle.remove()
