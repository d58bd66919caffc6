"""What lies where in a file of `torch.save`, found out by having torch write one without data.

`torch.serialization.skip_data` leaves out the bytes of storages: a sparse file of a few KiB on the disk. All that is
no tensor is taken from it. The zip has a checksum of each storage, which is that of nothing then; torch does not look
at these (it builds its zip reader without that check), other tools that unpack such a file do.

Source: torch 2.6 to 2.13 `serialization.py`, `_save`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowmem_load.formats.torch_zip import TorchZip
from lowmem_load.planning.expression import Expression, Source
from lowmem_load.read.source import LocalFile, read_bytes
from lowmem_load.saving.layout import FileLayout


def lay_out_zip(name: str, tensors: Mapping[str, Expression], scratch: Path) -> FileLayout:
    """Return the layout of the file in which `torch.save` puts an `OrderedDict` of these tensors.

    Args:
        name: of the file, a path with "/". torch puts its stem into the file.
        tensors: in their order. Two names of the same expression are one tensor there.
        scratch: a folder of this rank's own.
    """
    path = scratch / Path(name).name
    made: dict[int, torch.Tensor] = {}
    with FakeTensorMode():
        for part in tensors.values():
            if id(part) not in made:
                made[id(part)] = torch.empty(part.shape, dtype=part.dtype, device="cpu")
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(OrderedDict((key, made[id(part)]) for key, part in tensors.items()), path)
    file = LocalFile(str(path))
    try:
        described = TorchZip().describe(file)
        starts: dict[str, int] = {}
        for key in tensors:
            found = described.expression(key)
            assert isinstance(found, Source)  # of a contiguous tensor
            starts[key] = found.start
        nbytes = {key: math.prod(part.shape) * part.dtype.itemsize for key, part in tensors.items()}
        ends = sorted({(starts[key], starts[key] + nbytes[key]) for key in tensors})
        others, at = {}, 0
        for start, end in [*ends, (file.nbytes, file.nbytes)]:
            if start > at:
                others[at] = read_bytes(file, at, start - at)
            at = end
        return FileLayout(name, others.pop(0), file.nbytes, starts, others)
    finally:
        file.close()
        path.unlink()
