"""torch files (`pytorch_model*.bin`): describes tensors as byte ranges of the file, and runs no pickled code.

A file is a zip with plainly stored entries. `<prefix>/data.pkl` pickles the state dict, with a persistent id for each
storage; `<prefix>/data/<key>` has the bytes of a storage.
"""

from __future__ import annotations

import hashlib
import math
import os
import reprlib
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, NamedTuple, cast

import torch

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.files.format import NESTS, CheckpointFile, refuse_git_lfs_pointer
from lowmem_load.files.inert_pickle import Tensor, objects
from lowmem_load.files.source import ByteSource, read_bytes
from lowmem_load.planning.expression import Computed, Expression, Source, are_nested, merged_dims, strided
from lowmem_load.text import key_of

MAX_PICKLE_NBYTES = 32 << 20
"""Bytes of `data.pkl`. A tensor takes about 200, so this is 150,000 tensors. More would cost gigabytes of memory."""

MAX_DIRECTORY_NBYTES = 32 << 20
"""Bytes of the zip directory, for the same reason. A storage takes about 75."""

MAX_NESTS = 8
"""Dicts within each other around a state dict."""

_CONVERT = (
    "convert it once: state = torch.load(path, weights_only=True), then "
    'safetensors.torch.save_file(state, "model.safetensors", metadata={"format": "pt"}), '
    "or load the model without lowmem_load and call its save_pretrained(new_folder)"
)


class TorchZip:
    """The format of `pytorch_model*.bin` files, as `torch.save` writes them since torch 1.6."""

    def describe(self, source: ByteSource) -> CheckpointFile:
        """See `CheckpointFormat`. Equal views of one storage, such as tied weights, give the same expression object."""
        file = describe_objects(source, self.read)
        expressions: dict[bytes, Expression] = {}
        named: dict[str, Expression] = {}
        for name, tensor in file.tree.items():
            view = key_of(tensor)
            if view not in expressions:
                expressions[view] = file.expression(tensor, name)
            named[name] = expressions[view]
        return CheckpointFile(file.path, file.nbytes, file.digest, file.version, tuple(named), None, named.__getitem__)

    def read(self, pickled: bytes, path: str) -> dict[str, Tensor]:
        """Return the tensors of `data.pkl` by name."""
        return tensors_of(objects(pickled, path, only_tensors=True), path)


class NestedTorchZip(TorchZip):
    """The format of files whose state dict may lie in other dicts, under one of `NESTS`."""

    def read(self, pickled: bytes, path: str) -> dict[str, Tensor]:
        """Return the tensors of the state dict by name."""
        tree = objects(pickled, path)
        for _ in range(MAX_NESTS):  # a dict may be in itself
            is_nest = isinstance(tree, dict) and not any(isinstance(value, Tensor) for value in tree.values())
            inner = [tree[key] for key in NESTS if isinstance(tree.get(key), dict)] if is_nest else []
            if len(inner) != 1:
                break
            tree = inner[0]
        return tensors_of(tree, path)


class _Entry(NamedTuple):
    start: int
    nbytes: int
    checksum: int  # that the zip has of the data; never computed here


@dataclass(frozen=True, slots=True)
class TorchObjects:
    """A torch file, the tree of its pickle, and its storages by key. For the other fields see `CheckpointFile`."""

    path: str
    nbytes: int
    digest: str
    version: str
    tree: Any
    storages: Mapping[str, _Entry]

    def shifted(self, start: int) -> TorchObjects:
        """Return this for a zip that begins at byte `start` of its file."""
        storages = {key: entry._replace(start=start + entry.start) for key, entry in self.storages.items()}
        return replace(self, storages=storages)

    def checksum(self, tensor: Tensor) -> int | None:
        """Return the zip's checksum of a tensor's data; None if it has none, or the data are more than the tensor."""
        entry = self.storages.get(tensor.storage.key)
        if entry is None or entry.nbytes != math.prod(tensor.size) * tensor.dtype.itemsize:
            return None
        return entry.checksum or None  # 0: it was not computed

    def storage(self, tensor: Tensor, name: str) -> Source:
        """Return all bytes of the storage in which a tensor lies. See `expression`, which checks that it does."""
        self.expression(tensor, name)
        entry = self.storages[tensor.storage.key]
        return Source(self.path, name, entry.start, (entry.nbytes,), torch.uint8)

    def expression(self, tensor: Tensor, name: str) -> Expression:
        """Return a tensor of the tree, `name` in messages: a view of the bytes that it spans in its storage."""
        storage, size, itemsize = tensor.storage, tensor.size, tensor.dtype.itemsize
        where, entry = f"{self.path}: tensor {name!r}", self.storages.get(storage.key)
        storage_nbytes = storage.numel * storage.dtype.itemsize
        if entry is None or entry.nbytes != storage_nbytes:
            state = "is absent" if entry is None else f"has {entry.nbytes} bytes"
            raise CheckpointError(f"{where} needs data/{storage.key} of {storage_nbytes} bytes, which {state}")
        if math.prod(max(1, n) for n in size) * itemsize >= 1 << 63:
            raise CheckpointError(f"{where} has the impossible shape {size}")
        span = 1 + sum((n - 1) * stride for n, stride in zip(size, tensor.strides, strict=True)) if 0 not in size else 0
        if (tensor.offset + span) * itemsize > storage_nbytes:
            raise CheckpointError(
                f"{where} ends at element {tensor.offset + span} of data/{storage.key}, which has "
                f"{storage_nbytes // itemsize}"
            )
        stored = Source(self.path, name, entry.start + tensor.offset * itemsize, (span,), tensor.dtype)
        if not span or merged_dims(size, tensor.strides) in ([], [(span, 1)]):
            return replace(stored, shape=size)
        if are_nested(size, tensor.strides):
            return strided(stored, 0, tensor.strides, size)
        if math.prod(size) * itemsize > storage_nbytes:  # each rank would compute them all
            raise CheckpointError(
                f"{where} of shape {size} and strides {tensor.strides} has its elements several times, and more of "
                f"them than data/{storage.key}; save it again as {name}.clone()"
            )

        def view(values: Sequence[torch.Tensor]) -> torch.Tensor:
            return values[0].as_strided(size, tensor.strides).contiguous()

        return Computed("as_strided", view, (stored,), size, tensor.dtype)


def describe_objects(source: ByteSource, read: Callable[[bytes, str], Any] = objects) -> TorchObjects:
    """Read the directory and `data.pkl` of a torch file, without running it; `read` makes the tree."""
    version = source.version
    refuse_git_lfs_pointer(source)
    entries = _read_directory(source)
    prefixes = [name[: -len("/data.pkl")] for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(prefixes) != 1:
        raise CheckpointError(f"{source.path}: has {len(prefixes)} data.pkl instead of one, as a torch checkpoint has")
    (prefix,) = prefixes
    if f"{prefix}/constants.pkl" in entries:
        raise CheckpointError(f"{source.path}: is a TorchScript program; save its state dict with torch.save instead")
    byte_order = _read_entry(source, entries.get(f"{prefix}/byteorder"), 16)
    if byte_order not in (b"", b"little"):
        raise CheckpointError(f"{source.path}: byte order {byte_order!r}, expected little; save it again on x86 or ARM")
    pickled = _read_entry(source, entries[f"{prefix}/data.pkl"], MAX_PICKLE_NBYTES)
    places = repr(sorted((name, entry.start, entry.nbytes) for name, entry in entries.items()))
    digest = hashlib.sha256(pickled + places.encode()).hexdigest()[:16]
    data = f"{prefix}/data/"
    storages = {name.removeprefix(data): entry for name, entry in entries.items() if name.startswith(data)}
    return TorchObjects(source.path, source.nbytes, digest, version, read(pickled, source.path), storages)


class _ZipSource:
    # What `zipfile` needs of a file.
    def __init__(self, source: ByteSource) -> None:
        self._source, self._at = source, 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (self._source.nbytes if whence == os.SEEK_END else 0)
        if self._at < 0:
            raise OSError(f"byte {self._at} is before the start")
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        if nbytes > MAX_DIRECTORY_NBYTES:  # zipfile would parse a huge forged directory
            raise CheckpointError(
                f"{self._source.path}: has a zip directory of {nbytes} bytes, expected at most {MAX_DIRECTORY_NBYTES}"
            )
        content = read_bytes(self._source, self._at, nbytes if nbytes >= 0 else self._source.nbytes)
        self._at += len(content)
        return content


def _read_directory(source: ByteSource) -> dict[str, _Entry]:
    path, file = source.path, cast("IO[bytes]", _ZipSource(source))
    head = read_bytes(source, 0, 512)
    if head.startswith(b"\x80") or head[257:262] == b"ustar":  # a pickle, or a tar
        raise CheckpointError(
            f"{path}: is in an old torch format (before 1.6, not a zip), which lowmem_load cannot read; {_CONVERT}"
        )
    if not head.startswith(b"PK\x03\x04"):
        raise CheckpointError(f"{path}: is not a torch file: it does not begin as a zip does")
    try:
        if not zipfile.is_zipfile(file):
            raise TruncatedFileError(f"{path}: ends at byte {source.nbytes} without a zip directory; download it again")
        archive = zipfile.ZipFile(file)
    except CheckpointError:  # which is a ValueError
        raise
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, OSError) as error:
        raise CheckpointError(f"{path}: its zip directory is malformed: {error}") from error
    infos, directory_start = sorted(archive.infolist(), key=lambda info: info.header_offset), archive.start_dir
    starts = [*(info.header_offset for info in infos), directory_start]
    entries: dict[str, _Entry] = {}
    end = 0
    for info, next_start in zip(infos, starts[1:], strict=True):
        name = info.orig_filename
        if name in entries:
            raise CheckpointError(f"{path}: two zip entries are named {name!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 1:
            raise CheckpointError(
                f"{path}: zip entry {name!r} is compressed or encrypted, torch stores it plainly; {_CONVERT}"
            )
        if info.header_offset < end:
            raise CheckpointError(f"{path}: zip entry {name!r} overlaps the one before it, which ends at byte {end}")
        start = _implied_start(info, next_start) if getattr(source, "is_remote", False) else None
        entries[name] = _Entry(_data_start(source, info) if start is None else start, info.file_size, info.CRC)
        end = entries[name].start + info.file_size
        if end > directory_start:
            raise CheckpointError(f"{path}: zip entry {name!r} ends at byte {end}, the data at {directory_start}")
    return entries


def _name(info: zipfile.ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437")


def _data_start(source: ByteSource, info: zipfile.ZipInfo) -> int:
    name = _name(info)
    path, header = source.path, read_bytes(source, info.header_offset, 30 + len(name))
    if len(header) < 30 + len(name) or header[:4] != b"PK\x03\x04" or header[30:] != name:
        raise CheckpointError(f"{path}: zip entry {info.orig_filename!r} lacks its header at byte {info.header_offset}")
    method, *_, stored, size, name_nbytes, extra_nbytes = struct.unpack("<4x2xxxH2H3L2H", header[:30])
    follows = bool(info.flag_bits & 8)  # a descriptor after the data may have the sizes
    known = {info.file_size, 0xFFFFFFFF} | ({0} if follows else set())
    if method != zipfile.ZIP_STORED or name_nbytes != len(name) or not {stored, size} <= known:
        raise CheckpointError(f"{path}: header and directory disagree on zip entry {info.orig_filename!r}")
    return int(info.header_offset + 30 + name_nbytes + extra_nbytes)


def _implied_start(info: zipfile.ZipInfo, end: int) -> int | None:
    """Return the first byte of an entry's data as torch places it, without reading the entry's header; else None."""
    alignment = 64  # of the data, in bytes
    first = info.header_offset + 30 + len(_name(info))
    for descriptor_nbytes in (16, 24) if info.flag_bits & 8 else (0,):  # 24 beyond 4 GiB
        start = end - descriptor_nbytes - info.file_size
        if start % alignment == 0 and first <= start <= first + 24 + alignment:  # 24 for sizes beyond 4 GiB
            return start
    return None


def _read_entry(source: ByteSource, entry: _Entry | None, max_nbytes: int) -> bytes:
    if entry is None:
        return b""
    if entry.nbytes > max_nbytes:
        raise CheckpointError(
            f"{source.path}: a zip entry for metadata has {entry.nbytes} bytes, expected at most {max_nbytes}"
        )
    return read_bytes(source, entry.start, entry.nbytes)


def tensors_of(tensors: Any, path: str) -> dict[str, Tensor]:
    """Return a pickled tree if it is a state dict: tensors by name."""
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path}: contains a {type(tensors).__name__}, expected a dict of tensors by name")
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(
                f"{path}: entry {reprlib.repr(name)} is a {type(value).__name__}, expected a tensor under "
                "a string; save the model's state_dict() alone"
            )
    return tensors


# -- zips of one tensor within a larger file, as torch DCP writes them one after the other -----------------------------

HEAD_NBYTES = 1024
"""Bytes read of each zip: those before the data, which are 704 in torch 2.13."""


class _Window:
    """A part of a source, as a source."""

    def __init__(self, source: ByteSource, start: int, nbytes: int) -> None:
        self.path, self.version, self.nbytes = source.path, source.version, nbytes
        self._source, self._start = source, start

    def read_into(self, offset: int, memory: memoryview) -> None:
        self._source.read_into(self._start + offset, memory)

    def close(self) -> None:
        """Leave the source open."""


class ZippedTensors:
    """Finds tensors in files. Zips of tensors of one shape begin alike, so only the first is read beyond its head."""

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[bytes, Source]]] = {}  # by bytes of the zip: its head, and where the data lie

    def find(self, source: ByteSource, start: int, nbytes: int, name: str) -> Expression:
        """Return the tensor of the zip that lies at `start`, and is of `nbytes` bytes; `name` is for messages.

        Raises CheckpointError if a torch zip of one tensor is not there; another save has written the file, say.
        """
        window = _Window(source, start, nbytes)
        head = read_bytes(window, 0, HEAD_NBYTES)
        for known, values in self._known.get(nbytes, ()):
            if head.startswith(known):
                return replace(values, path=source.path, name=name, start=start + len(known))
        try:
            zipped = describe_objects(window).shifted(start)
            if not isinstance(zipped.tree, Tensor):
                raise CheckpointError(f"{source.path}: does not contain a tensor")
            expression = zipped.expression(zipped.tree, name)
        except CheckpointError as error:
            raise CheckpointError(
                f"{source.path}: tensor {name} is not in the {nbytes} bytes from byte {start} on, where .metadata says "
                f"it is: another save may have written the file ({error})"
            ) from error
        if isinstance(expression, Source) and expression.start - start <= HEAD_NBYTES:
            self._known.setdefault(nbytes, []).append((head[: expression.start - start], expression))
        return expression
