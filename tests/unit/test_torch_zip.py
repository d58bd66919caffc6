"""torch_zip.py: what torch.save wrote comes back bit by bit; anything else is refused by name and never run."""

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.files import torch_zip
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import Part, fill, read_whole
from lowmem_load.files.inert_pickle import Tensor
from lowmem_load.files.source import LocalFile
from lowmem_load.files.torch_zip import NestedTorchZip, TorchZip
from lowmem_load.planning.expression import Computed, Expression, Source, leaves
from lowmem_load.planning.regions import FlatRange
from tests.pickles import FIRST, REBUILD, STORAGE, assembled, colliding, with_tensor
from tests.unit.conftest import memory_below


def read_torch_zip(path: str) -> dict[str, Expression]:
    file = TorchZip().describe(LocalFile(path))
    return {name: file.expression(name) for name in file.names}


def saved(tmp_path: Path, state: Any, **kwargs: Any) -> str:
    path = tmp_path / "pytorch_model.bin"
    torch.save(state, path, **kwargs)
    return str(path)


def values(expressions: dict[str, Expression]) -> tuple[dict[str, torch.Tensor], int]:
    """Returns the tensors, and the bytes that were read for them."""
    with Executor() as reader:
        return {name: read_whole(reader, node) for name, node in expressions.items()}, reader.stats.read_bytes


def check_round_trip(tmp_path: Path, state: Any) -> dict[str, Expression]:
    found = read_torch_zip(saved(tmp_path, state))
    read, _ = values(found)
    assert list(read) == list(state)
    for name, tensor in state.items():
        assert (name, read[name].dtype, read[name].shape) == (name, tensor.dtype, tensor.shape)
        expected = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), expected), name
    return found


def test_dense_views_read_only_their_bytes(tmp_path: Path) -> None:
    base = torch.randn(6, 8, 10)
    state = {
        "whole": base,
        "rows": base[2:4],
        "row": base[3, 5],
        "transposed": base[1].t(),
        "permuted": base.permute(2, 0, 1),
        "permuted, narrow dims": base.permute(1, 2, 0).unsqueeze(1).unsqueeze(-1),
        "scalar": base[1, 2, 3],
        "empty": base[:, :0],
        "narrow": base[4:5, 3:4],
    }
    found = check_round_trip(tmp_path, state)
    assert not any(isinstance(leaf, Computed) for node in found.values() for leaf in leaves(node))
    _, read_bytes = values(found)
    assert read_bytes == sum(tensor.nbytes for tensor in state.values())


def test_views_with_gaps_are_read_by_ranges(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    state = {
        "columns": base[:, 2:5],
        "steps": base[::2],
        "expanded": base[0, :1].expand(4),
        "all": base[:1].expand(3, 8)[:, ::3].t(),
    }
    found = check_round_trip(tmp_path, state)
    assert not any(isinstance(leaf, Computed) for node in found.values() for leaf in leaves(node))


def test_views_whose_rows_overlap_are_computed_from_their_span(tmp_path: Path) -> None:
    (node,) = check_round_trip(tmp_path, {"windows": torch.randn(6, 8)[0].unfold(0, 3, 1)}).values()
    assert isinstance(node, Computed)
    assert [part.shape for part in node.parts] == [(8,)]


def test_a_repeated_element_is_read_by_ranges(tmp_path: Path) -> None:
    """A file of 2 KB held a tensor of 1 GiB, of which each rank computed all."""
    (node,) = read_torch_zip(saved(tmp_path, {"w": torch.ones(1).expand(1 << 40)})).values()
    memory = torch.zeros(1024)
    with Executor() as executor:
        costs = fill([Part("w", node, FlatRange(1 << 30, (1 << 30) + 1024), memory)], executor)
    assert memory.all()
    assert costs.largest_temporary_bytes == 0


def test_overlapping_rows_with_more_elements_than_their_storage_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, {"windows": torch.randn(1000).unfold(0, 500, 1)})
    with pytest.raises(CheckpointError, match=r"'windows' of shape \(501, 500\).* more of them than data/0"):
        read_torch_zip(path)


def test_tied_weights_are_one_expression(tmp_path: Path) -> None:
    weight = torch.randn(4, 6)
    found = check_round_trip(tmp_path, {"embed": weight, "head": weight.view(4, 6), "other": weight.clone()})
    assert found["embed"] is found["head"]
    assert found["embed"] is not found["other"]
    assert isinstance(found["embed"], Source)


# -- pickles ---------------------------------------------------------------------------------------------------------


def rewritten(path: str, change: dict[str, bytes | None], **kwargs: Any) -> str:
    """Rewrites a zip with some entries replaced (None: left out), by the zipfile module."""
    with zipfile.ZipFile(path) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    prefix = next(iter(entries)).split("/")[0]
    entries.update({f"{prefix}/{name}": data for name, data in change.items()})
    with zipfile.ZipFile(path, "w", **kwargs) as new:
        for name, data in entries.items():
            if data is not None:
                new.writestr(name, data)
    return path


@pytest.mark.parametrize(
    ("pickled", "text"),
    [
        (with_tensor(b"K\x00K\x04\x85K\x01\x85"), "ends at element 4"),
        (with_tensor(b"K\x02K\x02\x85K\x01\x85"), "ends at element 4"),
        (with_tensor(b"K\x04K\x00\x85K\x01\x85"), "ends at element 4"),
        (with_tensor(b"K\x00K\x02\x85K\x03\x85"), "ends at element 4"),
        (with_tensor(FIRST, STORAGE.replace(b"cpuK\x03", b"cpuK\x02")), "of 8 bytes, which has 12"),
        (with_tensor(FIRST, STORAGE.replace(b"\x000X", b"\x009X")), "data/9 of 12 bytes, which is absent"),
    ],
)  # fmt: skip
def test_views_that_leave_their_data_are_refused(tmp_path: Path, pickled: bytes, text: str) -> None:
    path = rewritten(saved(tmp_path, {"a": torch.ones(3)}), {"data.pkl": pickled})
    with pytest.raises(CheckpointError, match=text):
        read_torch_zip(path)


# -- zips that torch did not write -----------------------------------------------------------------------------------


def test_truncated(tmp_path: Path) -> None:
    path = Path(saved(tmp_path, {"a": torch.ones(300)}))
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(TruncatedFileError, match="download it again"):
        read_torch_zip(str(path))
    path.write_bytes(data + b"x")  # torch reads it, too
    assert list(read_torch_zip(str(path))) == ["a"]
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="not a torch file"):
        read_torch_zip(str(path))


def test_entries_that_are_not_plain(tmp_path: Path) -> None:
    state = {"a": torch.ones(300)}
    with pytest.raises(CheckpointError, match="compressed"):
        read_torch_zip(rewritten(saved(tmp_path, state), {}, compression=zipfile.ZIP_DEFLATED))
    assert list(read_torch_zip(rewritten(saved(tmp_path, state), {}))) == ["a"]
    with pytest.raises(CheckpointError, match="byte order b'big'"):
        read_torch_zip(rewritten(saved(tmp_path, state), {"byteorder": b"big"}))
    assert list(read_torch_zip(rewritten(saved(tmp_path, state), {"byteorder": None}))) == ["a"]  # before torch 2.1
    with pytest.raises(CheckpointError, match=r"0 data\.pkl"):
        read_torch_zip(rewritten(saved(tmp_path, state), {"data.pkl": None}))
    with pytest.raises(CheckpointError, match="data/0 of 1200 bytes, which is absent"):
        read_torch_zip(rewritten(saved(tmp_path, state), {"data/0": None}))
    with pytest.raises(CheckpointError, match="TorchScript"):
        read_torch_zip(rewritten(saved(tmp_path, state), {"constants.pkl": b""}))


def directory_entries(data: bytes) -> list[int]:
    """Returns where each entry of the zip directory begins."""
    found, at = [], data.find(b"PK\x01\x02")
    while at >= 0:
        found.append(at)
        at = data.find(b"PK\x01\x02", at + 1)
    return found


def test_forged_directories(tmp_path: Path) -> None:
    path = Path(rewritten(saved(tmp_path, {"a": torch.ones(300)}), {}))
    data = path.read_bytes()
    first, second, *_ = directory_entries(data)
    with zipfile.ZipFile(path) as file:
        sizes = {info.filename: info for info in file.infolist()}
    pickle_nbytes = next(info.file_size for name, info in sizes.items() if name.endswith("data.pkl"))

    def refused(changes: dict[int, bytes], match: str) -> None:
        forged = bytearray(data)
        for at, value in changes.items():
            forged[at : at + len(value)] = value
        path.write_bytes(forged)
        with pytest.raises(CheckpointError, match=match):
            read_torch_zip(str(path))

    longer = (pickle_nbytes + 64).to_bytes(4, "little")
    refused({first + 20: longer, first + 24: longer}, "header and directory disagree")
    refused({first + 20: longer, first + 24: longer, 18: longer, 22: longer}, "overlaps")
    refused({second + 42: data[first + 42 : first + 46]}, "overlaps|zip entry .* lacks its header")
    refused({second + 42: (len(data) - 5).to_bytes(4, "little")}, "zip entry .* lacks its header")
    refused({first + 24: longer}, "compressed")
    refused({first + 8: b"\x01\x00"}, "compressed or encrypted")
    refused({0: b"PK\x03\x05"}, "not begin as a zip")
    refused({first: b"PK\x01\x03"}, "malformed")
    huge = (1 << 30).to_bytes(4, "little")
    refused({len(data) - 10: huge}, "zip directory is malformed|zip directory of .* bytes, expected at most")


def test_two_entries_of_one_name(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(3)})
    prefix = Path(path).stem
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr(f"{prefix}/data/0", bytes(12))
    with pytest.raises(CheckpointError, match="two zip entries"):
        read_torch_zip(path)


def test_metadata_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, {"a": torch.ones(3)})
    monkeypatch.setattr(torch_zip, "MAX_PICKLE_NBYTES", 100)
    with pytest.raises(CheckpointError, match="at most 100"):
        read_torch_zip(path)
    monkeypatch.setattr(torch_zip, "MAX_DIRECTORY_NBYTES", 50)
    with pytest.raises(CheckpointError, match=r"zip directory of .* at most 50"):
        read_torch_zip(path)


def test_zip64_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, {"a": torch.arange(3.0)})
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)  # zipfile then writes the 64-bit records
    rewritten(path, {})
    assert b"PK\x06\x06" in Path(path).read_bytes()
    assert values(read_torch_zip(path))[0]["a"].tolist() == [0.0, 1.0, 2.0]


# -- other formats ---------------------------------------------------------------------------------------------------


def test_other_formats_say_how_to_convert(tmp_path: Path) -> None:
    old = saved(tmp_path, {"a": torch.ones(3)}, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"old torch format.*weights_only=True.*save_file"):
        read_torch_zip(old)
    buffer = io.BytesIO(bytes(257) + b"ustar" + bytes(300))
    Path(old).write_bytes(buffer.getvalue())
    with pytest.raises(CheckpointError, match="old torch format"):
        read_torch_zip(old)
    Path(old).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointError, match="git lfs pull"):
        read_torch_zip(old)


def test_views_with_equal_hashes_take_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides of dims of one element are free to choose: thousands of views were compared with each other."""
    compared = 0
    equal = Tensor.__eq__

    def counted(one: Tensor, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(one, other)

    monkeypatch.setattr(Tensor, "__eq__", counted)
    base = torch.ones(1)
    state = {str(strides): base.as_strided((1, 1), strides) for strides in colliding(300)}
    assert list(read_torch_zip(saved(tmp_path, state))) == list(state)
    assert compared < 300


def test_views_that_share_long_strides_take_little_memory(tmp_path: Path) -> None:
    """Dims of one element may have any strides. A text of them was kept for each view."""
    count, storage = 20_000, STORAGE.replace(b"Float", b"Byte").replace(b"cpuK\x03", b"cpuM\x20\x4e")
    strides = b"".join(b"\x8a\x08" + (1 << 59 | place).to_bytes(8, "little") for place in range(64))
    parts = REBUILD, storage, b"(" + b"K\x01" * 64 + b"t", b"(" + strides + b"t", b"ccollections\nOrderedDict\n)R"
    kept = [part + b"q" + bytes([number]) for number, part in enumerate(parts)]
    again = [b"h" + bytes([number]) for number in range(len(parts))]

    def view(at: int) -> bytes:
        rebuild, stored, sizes, steps, hooks = again if at else kept
        offset = b"M" + at.to_bytes(2, "little")
        return (
            b"X\x05\x00\x00\x00%05d" % at + rebuild + b"(" + stored + offset + sizes + steps + b"\x89" + hooks + b"tRs"
        )

    pickled = assembled(b"}" + b"".join(map(view, range(count))))
    zeros = {"a": torch.zeros(count, dtype=torch.uint8)}
    path = rewritten(saved(tmp_path, zeros), {"data.pkl": pickled})
    with memory_below(40 * os.path.getsize(path)):
        assert len(read_torch_zip(path)) == count


def test_a_compressed_entry_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """A zip bomb: 64 MiB of zeros in 64 KiB."""
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", bytes(64 << 20))
    error = r"zip entry 'x/data.pkl' is compressed or encrypted"
    with memory_below(1 << 20), pytest.raises(CheckpointError, match=error):
        read_torch_zip(str(path))


def test_a_dict_that_holds_itself_is_no_state_dict(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["model"] = state
    with pytest.raises(CheckpointError, match="entry 'model' is a Items, expected a tensor"):
        NestedTorchZip().describe(LocalFile(saved(tmp_path, state)))
    inside = saved(tmp_path, {"epoch": 1, "model": {"module": {"state_dict": {"a": torch.ones(2)}}}})
    assert NestedTorchZip().describe(LocalFile(inside)).names == ("a",)
