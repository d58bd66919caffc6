"""Headers of files, against safetensors' own and what torch loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from lowmem_load.errors import UnsupportedError
from lowmem_load.formats.safetensors import DTYPES, PACKED
from lowmem_load.planning.expression import Source
from lowmem_load.saving.folder import find_target, make_staging
from lowmem_load.saving.writer import digest_of, lay_out, lay_out_zip


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


def test_torch_loads_what_is_written_to_the_offsets(tmp_path: Path) -> None:
    values = {
        "one": torch.randn(5, 3),
        "two": torch.arange(7),
        "nothing": torch.empty(0, 4),
        "half": torch.randn(300, 2).bfloat16(),
        "scalar": torch.tensor(2.0),
    }
    parts = {name: Source("", name, 0, tuple(value.shape), value.dtype) for name, value in values.items()}
    parts["tied"], values["tied"] = parts["one"], values["one"]
    (tmp_path / "scratch").mkdir()
    layout = lay_out_zip("below/model.bin", parts, tmp_path / "scratch")
    assert not list((tmp_path / "scratch").iterdir())
    staging = make_staging([find_target(tmp_path / "out")], [layout])
    path = staging.path / layout.name
    with path.open("r+b") as file:
        for name, value in values.items():
            file.seek(layout.starts[name])
            file.write(value.view(-1).view(torch.uint8).numpy().tobytes())
    others = len(layout.header) + sum(map(len, layout.others.values()))
    assert layout.nbytes - others == sum(value.nbytes for name, value in values.items() if name != "tied")
    assert path.stat().st_size == layout.nbytes
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert list(found) == list(values)
        assert all(torch.equal(found[name], value) for name, value in values.items())
    assert found["tied"].data_ptr() == found["one"].data_ptr()
    torch.save(dict(found), tmp_path / "plain.bin")
    assert abs((tmp_path / "plain.bin").stat().st_size - layout.nbytes) < 2000


def test_all_ranks_lay_out_the_same(tmp_path: Path) -> None:
    parts = {"one": Source("", "one", 0, (5, 3), torch.float32)}
    layouts = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        layouts.append(lay_out_zip("model.bin", parts, tmp_path / str(rank)))
    assert layouts[0] == layouts[1]
