"""Checkpoints as DeepSpeed's `save_checkpoint` writes them, made without ranks: of any number of them.

Written from what DeepSpeed 0.19.8 saves (`tests/multi_rank/test_resume.py` compares with the real thing). Under ZeRO-3
each rank's partition of a parameter is one of `world_size` equal chunks of it, padded; a sub-group is the concatenation
of those.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch


class LossScaler:
    """Stands for DeepSpeed's own class: an object that no inert reader makes."""

    def __init__(self) -> None:
        self.cur_scale = 1.0
        self.dynamic = False


def partitions(values: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """Return the padded flat pieces of a tensor; the padding is not zero, as DeepSpeed does not clear it."""
    flat = values.reshape(-1)
    padding = torch.full((-flat.numel() % world_size,), 7.0, dtype=flat.dtype)
    return list(torch.cat([flat, padding]).view(world_size, -1))


def sub_groups(shapes: dict[str, torch.Size], world_size: int, sub_group_size: int) -> list[OrderedDict[str, Any]]:
    """Return the names and shapes of each sub-group: one ends as soon as it has `sub_group_size` elements of a rank."""
    groups: list[OrderedDict[str, Any]] = [OrderedDict()]
    held = 0
    for number, (name, shape) in enumerate(shapes.items()):
        groups[-1][name] = shape
        held += -(-shape.numel() // world_size)
        if held >= sub_group_size and number + 1 < len(shapes):
            groups.append(OrderedDict())
            held = 0
    return groups


def swap_out(tensor: Any, folder: Path) -> None:
    """Write a tensor as DeepSpeed's swapper does, padded to whole KiB and named by its attribute; empty it."""
    folder.mkdir(parents=True, exist_ok=True)
    padding = torch.full((256 - tensor.numel() % 256,), 7.0)
    (folder / f"{tensor.ds_id}.tensor.swp").write_bytes(torch.cat([tensor, padding]).numpy().tobytes())
    tensor.data = torch.Tensor()


def states_of(
    module: dict[str, torch.Tensor],
    groups: list[OrderedDict[str, Any]],
    frozen: dict[str, torch.Tensor],
    fragments: dict[str, torch.Tensor],
    world_size: int,
    steps: int,
) -> dict[str, Any]:
    """Return the model states of a rank."""
    return {
        "module": module,
        "buffer_names": [],
        "param_shapes": groups,
        "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen.items()),
        "frozen_param_fragments": OrderedDict(fragments),
        "shared_params": {},
        "lr_scheduler": {"last_batch_iteration": 2},
        "skipped_steps": 0,
        "global_steps": steps,
        "global_samples": 2 * steps,
        "dp_world_size": world_size,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
    }


def save_zero3(
    folder: Path,
    trained: dict[str, torch.Tensor],
    *,
    world_size: int,
    sub_group_size: int = 1 << 40,
    frozen: dict[str, torch.Tensor] | None = None,
    buffers: dict[str, torch.Tensor] | None = None,
    shared: dict[str, str] | None = None,
    moments: dict[str, dict[str, torch.Tensor]] | None = None,
    client_state: dict[str, Any] | None = None,
    swapped: bool = False,
    steps: int = 3,
    lr: float = 1e-3,
) -> Path:
    """Write the files of all ranks, of fp32 values by name; return the folder of the tag, next to which is `latest`.

    `shared` are names that stand for another; `moments` values by key of the optimizer's state and name; if `swapped`
    the optimizer was on nvme.
    """
    frozen, moments = frozen or {}, moments or {}
    place = folder / f"global_step{steps}"
    place.mkdir(parents=True)
    groups = sub_groups({name: value.shape for name, value in trained.items()}, world_size, sub_group_size)
    for rank in range(world_size):

        def flat(values: dict[str, torch.Tensor], group: OrderedDict[str, Any], rank: int = rank) -> torch.Tensor:
            return torch.cat([partitions(values[name], world_size)[rank] for name in group])

        fragments = {name: partitions(value, world_size)[rank].clone() for name, value in frozen.items()}
        module = OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in (*trained, *frozen))
        model_states = {
            **states_of(OrderedDict({**module, **(buffers or {})}), groups, frozen, fragments, world_size, steps),
            "buffer_names": list(buffers or {}),
            "shared_params": dict(shared or {}),
            **(client_state or {}),
        }
        torch.save(model_states, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        state = {
            number: {
                "step": torch.tensor(float(steps)),
                **{key: flat(values, group) for key, values in moments.items()},
            }
            for number, group in enumerate(groups)
        }
        masters = [flat(trained, group) for group in groups]
        for number, master in enumerate(masters):
            master.ds_id = str(number)  # DeepSpeed gives these tensors an attribute, which changes how they are pickled
            if swapped:
                for key in moments:
                    state[number][key].ds_id = f"{key}-{number}"
                for tensor in (master, *(state[number][key] for key in moments)):
                    swap_out(tensor, place / "offloaded_tensors" / f"rank{rank:02d}")
        zero = {
            "zero_stage": 3,
            "loss_scaler": LossScaler(),
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": world_size,
            "optimizer_state_dict": {"state": state, "param_groups": [{"lr": lr, "params": list(range(len(groups)))}]},
            "fp32_flat_groups": masters,
        }
        path = place / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": zero, "ds_config": {}, "ds_version": "0.19.8"}, path)
    (folder / "latest").write_text(place.name)
    return place
