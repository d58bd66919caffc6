"""What stock ZeRO-3 would take for the same load, at least. Pure.

Source: transformers 5.23 `integrations/deepspeed.py`, deepspeed 0.19.8 `runtime/zero/partition_parameters.py`: rank 0
maps all files into one state dict; every parameter is broadcast when it is made, gathered, and broadcast with its
values. `make bench` measured 3.0 times the model's bytes in collectives, and on rank 0 the partition, all files, and
about 900 MiB besides for a model of 3 GB.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_load.planning.load_plan import LoadPlan

COLLECTIVE_FACTOR = 3
"""How often every byte of the model goes through collectives."""


@dataclass(frozen=True, slots=True)
class StockNeeds:
    """What stock takes, at least. Bytes.

    Attributes:
        read_bytes: that rank 0 reads: all files. The other ranks read nothing.
        host_peak_bytes: of rank 0: all files, mapped, beside its partition where that is on the host.
        whole_parameter_bytes: that every rank holds besides, of the largest parameter, whole.
        collective_bytes: that each rank receives or sends.
    """

    read_bytes: int
    host_peak_bytes: int
    whole_parameter_bytes: int
    collective_bytes: int


def stock_needs(plan: LoadPlan, *, held_on_host_bytes: int) -> StockNeeds:
    """Return what stock takes for a planned load.

    Args:
        plan: of any rank.
        held_on_host_bytes: of a rank when the load is done.
    """
    file_bytes = sum(file.nbytes for file in plan.files)
    sizes = [target.numel * target.dtype.itemsize for target in plan.targets]
    return StockNeeds(
        read_bytes=file_bytes,
        host_peak_bytes=file_bytes + held_on_host_bytes,
        whole_parameter_bytes=max(sizes, default=0),
        collective_bytes=COLLECTIVE_FACTOR * sum(sizes) if plan.world_size > 1 else 0,
    )
