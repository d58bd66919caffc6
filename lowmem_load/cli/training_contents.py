"""What `lowmem-load inspect` says of a training checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from lowmem_load.io.executor import Executor
from lowmem_load.text import count, size
from lowmem_load.training_checkpoints.open_model import Values, open_model
from lowmem_load.training_checkpoints.open_state import find_state


@dataclass(frozen=True, slots=True)
class TrainingContents:
    """A training checkpoint. `by_dtype` has numbers of tensors and bytes; `config` is the folder with config.json."""

    folder: str
    kind: str
    num_tensors: int
    num_elements: int
    by_dtype: dict[str, tuple[int, int]]
    num_adapter_tensors: int
    num_files: int
    file_bytes: int
    config: str | None

    def rows(self) -> dict[str, str]:
        """Return what a table shows."""
        dtypes = (f"{dtype}: {number:,} of {size(nbytes)}" for dtype, (number, nbytes) in self.by_dtype.items())
        return {
            "written by": self.kind,
            "parameters": count(self.num_elements) if self.num_elements else "",
            "tensors": f"{self.num_tensors:,}; {', '.join(dtypes)}" if self.num_tensors else "",
            "of an adapter": f"{self.num_adapter_tensors:,} tensors" if self.num_adapter_tensors else "",
            "files": f"{size(self.file_bytes)} in {self.num_files:,} file{'s' * (self.num_files != 1)}",
            "config.json": self.config or "none: name the model by --config when you consolidate it",
        }


def is_of_training(folder: str) -> bool:
    """Return whether a local folder holds a checkpoint of training, and no model to load by its name."""
    if not os.path.isdir(folder) or os.path.isfile(os.path.join(folder, "model.safetensors.index.json")):
        return False
    return os.path.isfile(os.path.join(folder, "latest")) or find_state(folder) is not None


def training_contents(folder: str) -> TrainingContents:
    """Return what a training checkpoint holds. No weights are read."""
    with Executor() as executor:
        model = open_model(folder, executor)
    distinct: dict[int, Values] = {id(tensor): tensor for tensor in model.tensors.values()}
    numbers, nbytes = Counter[str](), Counter[str]()
    for tensor in distinct.values():
        dtype = str(tensor.dtype).removeprefix("torch.")
        numbers[dtype] += 1
        nbytes[dtype] += tensor.numel * tensor.dtype.itemsize
    return TrainingContents(
        folder=model.folder,
        kind=model.kind,
        num_tensors=len(distinct),
        num_elements=sum(tensor.numel for tensor in distinct.values()),
        by_dtype={dtype: (numbers[dtype], nbytes[dtype]) for dtype in numbers},
        num_adapter_tensors=len(model.adapter),
        num_files=len(model.files),
        file_bytes=sum(file.nbytes for file in model.files),
        config=model.companion("config.json"),
    )
