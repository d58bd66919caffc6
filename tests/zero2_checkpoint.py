"""A checkpoint as DeepSpeed's `save_checkpoint` writes it under ZeRO stages 1 and 2, made without ranks.

Written from what DeepSpeed 0.19.8 saves (`tests/multi_rank/test_resume.py` compares with the real thing): the
parameters of a group lie one behind the other, padded, and are cut into as many flat tensors as there are ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch


def save_zero2(
    folder: Path,
    trained: dict[str, torch.Tensor],
    *,
    world_size: int,
    alignment: int = 1,
    frozen: dict[str, torch.Tensor] | None = None,
    moments: dict[str, dict[str, torch.Tensor]] | None = None,
    stage: Any = 2,
) -> Path:
    """Write the files of all ranks; return the folder of the tag.

    Args:
        folder: gets the folder of the tag, and `latest`.
        trained: fp32 values by name.
        world_size: ranks.
        alignment: elements, of which each parameter but the first begins at a multiple.
        frozen: values by name.
        moments: values by key of the optimizer's state and name.
        stage: that is named, or a member of an enumeration; None for the optimizer that names none.
    """
    frozen, moments = frozen or {}, moments or {}
    place = folder / "global_step3"
    place.mkdir(parents=True)
    ends = torch.tensor([value.numel() for value in trained.values()]).tolist()
    paddings = [-numel % alignment for numel in ends[:-1]] + [0]
    needed = sum(ends) + sum(paddings)
    size = -(-needed // world_size) + 2

    def chain(values: dict[str, torch.Tensor]) -> torch.Tensor:
        pieces = [
            torch.cat([values[name].reshape(-1), torch.full((padding,), 7.0)])
            for name, padding in zip(trained, paddings, strict=True)
        ]
        return torch.cat([*pieces, torch.full((size * world_size - needed,), 7.0)])

    whole = OrderedDict((name, value.bfloat16()) for name, value in {**trained, **frozen}.items())
    model_states: dict[str, Any] = {
        "module": whole,
        "buffer_names": [],
        "param_shapes": [OrderedDict((name, value.shape) for name, value in trained.items())],
        "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen.items()),
        "frozen_param_fragments": OrderedDict(frozen),
        "shared_params": {},
        "skipped_steps": 0,
        "global_steps": 3,
        "global_samples": 6,
        "dp_world_size": world_size,
        "mp_world_size": 1,
    }
    torch.save(model_states, place / "mp_rank_00_model_states.pt")
    for rank in range(world_size):
        mine = slice(rank * size, (rank + 1) * size)
        state = {"step": torch.tensor(3.0), **{key: chain(values)[mine].clone() for key, values in moments.items()}}
        zero: dict[str, Any] = {
            "partition_count": [world_size],
            "param_alignment_paddings": [paddings],
            "base_optimizer_state": {"state": {0: state}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
            "single_partition_of_fp32_groups": [chain(trained)[:needed][mine].clone()],
        }
        zero.update({} if stage is None else {"zero_stage": stage})
        path = place / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": zero}, path)
    (folder / "latest").write_text("global_step3")
    return place
