"""Counts the bytes of tensors that a rank gives to collectives."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

LARGE_PAYLOAD_BYTES = 64 * 1024
"""Status words, sizes and pickled digests are far smaller than this; weights are far larger."""

COLLECTIVES = (
    "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_coalesced", "all_reduce",
    "all_reduce_coalesced", "inference_all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all",
    "all_to_all_single", "gather", "scatter", "send", "recv", "isend", "irecv",
)  # fmt: skip


@dataclass(slots=True)
class NetworkUse:
    """Collectives of several ranks, and tensor bytes that this one gave to them; `large`: payloads above 64 KiB."""

    num_calls: int = 0
    payload_bytes: int = 0
    large_payload_bytes: int = 0


class CollectiveCounter:
    """Counts tensor payloads of collectives while `active`.

    It wraps torch.distributed's functions and DeepSpeed's backend methods. DeepSpeed calls torch through the
    latter, or its shared-memory kernels past torch: a call within a call is counted once, at the outermost.
    """

    def __init__(self) -> None:
        self.active = False
        self.use = NetworkUse()
        self._within = threading.local()

    def install(self) -> None:
        """Wrap torch's collectives; to be called before anything does `from torch.distributed import ...`."""
        import torch.distributed
        from torch.distributed import distributed_c10d

        for name in COLLECTIVES:
            if hasattr(distributed_c10d, name):
                wrapped = self._wrap(getattr(distributed_c10d, name))
                # Both modules: object collectives look the tensor collectives up in distributed_c10d.
                setattr(distributed_c10d, name, wrapped)
                setattr(torch.distributed, name, wrapped)

    def install_deepspeed(self) -> None:
        from deepspeed.comm.torch import TorchBackend

        for name in COLLECTIVES:
            if hasattr(TorchBackend, name):
                setattr(TorchBackend, name, self._wrap(getattr(TorchBackend, name)))

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not self.active or getattr(self._within, "call", False):
                return function(*args, **kwargs)
            self._count([*args, *kwargs.values()])
            self._within.call = True
            try:
                return function(*args, **kwargs)
            finally:
                self._within.call = False

        return counted

    def _count(self, values: list[Any]) -> None:
        if _group_size(values) < 2:
            return
        # The larger side of a call: all-gather's output, reduce-scatter's input, broadcast's only tensor.
        payload = max((_tensor_bytes(value) for value in values), default=0)
        self.use.num_calls += 1
        self.use.payload_bytes += payload
        self.use.large_payload_bytes += payload if payload > LARGE_PAYLOAD_BYTES else 0


def _group_size(values: Iterable[Any]) -> int:
    import torch.distributed as dist

    groups = [value for value in values if isinstance(value, dist.ProcessGroup)]
    return groups[0].size() if groups else dist.get_world_size()


def _tensor_bytes(value: Any) -> int:
    import torch

    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(item) for item in value)
    return 0
