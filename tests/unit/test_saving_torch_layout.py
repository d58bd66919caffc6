"""Files of torch.save, laid out without data: what is written to their offsets is what torch loads."""

from __future__ import annotations

from pathlib import Path

import torch

from lowmem_load.planning.expression import Source
from lowmem_load.saving.folder import make_file, make_staging
from lowmem_load.saving.torch_layout import lay_out_zip


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
    staging = make_staging(tmp_path / "out", layout.nbytes)
    make_file(staging, layout.name, layout.header, layout.nbytes, layout.others)
    path = staging.path / layout.name
    with path.open("r+b") as file:
        for name, value in values.items():
            file.seek(layout.starts[name])
            file.write(value.view(-1).view(torch.uint8).numpy().tobytes())
    assert layout.data_bytes == sum(value.nbytes for name, value in values.items() if name != "tied")
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
