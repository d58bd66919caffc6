"""Headers of files, against safetensors' own."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from lowmem_load.errors import UnsupportedError
from lowmem_load.formats.safetensors import DTYPES, PACKED
from lowmem_load.saving.layout import digest_of, lay_out


@pytest.mark.parametrize("metadata", [{"format": "pt"}, {}])
def test_a_file_begins_as_safetensors_begins_it(metadata: dict[str, str]) -> None:
    dtypes = [dtype for code, dtype in DTYPES.items() if code not in PACKED]
    tensors = {f"b{number}": torch.zeros((2, 3), dtype=dtype) for number, dtype in enumerate(dtypes)}
    tensors |= {f"a{number}": torch.zeros((), dtype=dtype) for number, dtype in enumerate(dtypes)}
    tensors |= {"empty": torch.zeros((0, 3)), 'ü"\\\n/': torch.zeros(3)}
    theirs = save(tensors, metadata or None)
    ours = lay_out("f", {key: (value.dtype, tuple(value.shape)) for key, value in tensors.items()}, metadata)
    assert ours.header == theirs[: len(ours.header)]
    assert ours.nbytes == len(theirs)
    assert list(ours.starts.values()) == sorted(ours.starts.values())


def test_a_dtype_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"f: x is of torch\.complex128"):
        lay_out("f", {"x": (torch.complex128, (1,))}, {})


def test_digests_tell_layouts_apart() -> None:
    tensors = {"x": (torch.float32, (2, 3))}
    layouts = [
        lay_out("f", tensors, {}),
        lay_out("g", tensors, {}),
        lay_out("f", tensors, {"format": "pt"}),
        lay_out("f", {"x": (torch.float32, (3, 2))}, {}),
    ]
    assert len({digest_of([layout]) for layout in layouts}) == len(layouts)
