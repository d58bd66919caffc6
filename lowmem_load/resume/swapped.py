"""Where the optimizer's states lie that were on nvme when a checkpoint was saved: in the swapper's files.

DeepSpeed copies the swapper's folder of each rank into the checkpoint. In the rank's file of optimizer states the
tensors of a sub-group that is swapped are empty then, and their attribute `ds_id` names the file that has the elements,
in fp32, with padding at its end. Sub-groups of less than 1 MiB are not swapped, and saved as ever.

Source: deepspeed 0.16.4 to 0.19.8 `runtime/engine.py`, `save_checkpoint`; `runtime/swap_tensor/optimizer_utils.py`,
`SwapTensorContext` and `_get_state_tensors`.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import torch

from lowmem_load.errors import CheckpointError
from lowmem_load.formats.inert_objects import shown
from lowmem_load.formats.pickled_tensor import Tensor

FOLDER = "offloaded_tensors"
"""Of the swapper's files, in the folder of the tag."""

DTYPE = torch.float32
"""Of what is in them."""


def is_swapped(tensor: Any, size: int) -> bool:
    """Return whether a tensor of which `size` elements are expected lies in a file of the swapper."""
    return isinstance(tensor, Tensor) and size > 0 and not math.prod(tensor.size) and "ds_id" in tensor.attributes


def swap_file(folder: str, rank: int, world_size: int, tensor: Tensor, what: str) -> str:
    """Return the path of the file that holds a tensor.

    Args:
        folder: of the tag.
        rank: that has saved it.
        world_size: ranks that have saved.
        tensor: empty, with its name.
        what: it is, for messages.

    Raises:
        CheckpointError: its name is none, or the files of ranks were copied over each other.
    """
    name = tensor.attributes["ds_id"]
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]{1,200}", name):
        raise CheckpointError(
            f"{folder}: {what} was on nvme under the name {shown(name)}, which is none of DeepSpeed's"
        )
    own = os.path.join(folder, FOLDER, f"rank{rank:02d}")
    if not os.path.isdir(own):
        if world_size > 1:
            raise CheckpointError(
                f"{own}: is missing, with the states of an optimizer that was on nvme: ranks of deepspeed 0.17 and "
                "older copy theirs over each other's, and with use_node_local_storage each node has its own"
            )
        own = os.path.join(folder, FOLDER)
    return os.path.join(own, f"{name}.tensor.swp")
