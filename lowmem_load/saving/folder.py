"""A folder that appears all at once: a save fills a staging folder, which then takes the place of its target.

[Note: all at once] A save writes to a staging folder of another name. When everything in it has reached the disk, the
staging folder and the target are exchanged by one system call (`renameat2`; two renames where the file system lacks
it). What the former folder had besides is then moved over. So after a save that ended in any way, also by a signal or
with the machine, there is the former folder or the new one. A mixture of both would load wrong weights without an
error, because their shards have the same names and shapes.

Some folders cannot be renamed: those that are or have a mount point, the working directory, folders whose parent may
not be written, and those of a lower layer of overlayfs. Their files are replaced one by one. The files that loaders
look for are removed first and come back last, so the folder does not load in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.saving.writer import FileLayout
from lowmem_load.text import size

PROBE = ".lowmem_load_probe"
"""File by which ranks tell that they see one folder. It marks the staging folder of a save that has not ended."""

_SAVING, _REMOVED = "saving-", "removed-"
"""Parts of the names of folders that are being filled, and of folders that are being deleted."""

_FORMER = ".former"
"""Folder in a staging folder inside the target, for files of the target that have the same names as the new ones."""

_SHARD = r"-\d{5}-of-\d{5}"
"""In the name of a file of weights where there are several."""

_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_AT_CWD = -100  # AT_FDCWD of linux/fcntl.h


@dataclass(frozen=True, slots=True)
class Staging:
    """The folder that files are written to first, as this rank knows it: nodes may have the disk under other paths.

    Attributes:
        target: folder that the files are meant for, without symbolic links.
        token: random text of this save, in the name of the staging folder and in the probe file.
        is_inside: whether the staging folder lies in the target, because that cannot be renamed.
    """

    target: Path
    token: str
    is_inside: bool

    @property
    def path(self) -> Path:
        """The staging folder."""
        return self.folder(_SAVING + self.token)

    def folder(self, state: str) -> Path:
        """Return the path of a hidden folder of this save, beside the target or inside it."""
        return self.target / f".{state}" if self.is_inside else self.target.with_name(f".{self.target.name}.{state}")


def find_target(folder: str | os.PathLike[str]) -> str:
    """Return the folder of a save, without symbolic links; raise ConfigError if it is a file."""
    target = os.path.realpath(folder)
    # One look: whoever saves or tidies up may rename or remove it now.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISDIR(os.stat(target).st_mode):
            raise ConfigError(f"{folder}: is a file; name a folder")
    return target


def make_staging(targets: Sequence[str], files: Sequence[FileLayout]) -> Staging:
    """Make a staging folder with files, and remove what earlier saves to the target left when they were killed.

    The files have their full length, and everything but the tensors' data. `targets` are those of all ranks, this one's
    first. Raises ConfigError if the folder cannot be made, or the disk is too small.
    """
    target = Path(targets[0])
    try:
        # Under another path it may be a mount point, beside which this node and another see different folders.
        is_inside = target.is_dir() and not (len({*targets}) == 1 and _can_be_renamed(target))
        staging = Staging(target, secrets.token_hex(4), is_inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        _finish_what_is_left(staging)
        needed_bytes = sum(file.nbytes for file in files)
        free_bytes = shutil.disk_usage(staging.path.parent).free
        if free_bytes < needed_bytes:
            beside = " beside the former files, which stay until the new ones are complete" if target.is_dir() else ""
            raise ConfigError(
                f"{target}: needs {size(needed_bytes)}{beside}, but {size(free_bytes)} are free; nothing was written. "
                "Free space, remove the former files first, or save to another folder"
            )
        staging.path.mkdir()
        try:
            (staging.path / PROBE).write_text(staging.token)
            if target.is_dir():
                shutil.copymode(target, staging.path)
            for file in files:
                _make_file(staging.path / file.name, file)
        except BaseException:
            _remove(staging.path, staging)
            raise
    except OSError as error:
        raise ConfigError(f"{target}: cannot be saved to: {error}") from error
    return staging


def check_seen(staging: Staging, made: str) -> None:
    """Raise ConfigError unless this rank sees the staging folder that rank 0 made, whose path there is `made`."""
    with contextlib.suppress(OSError):
        if (staging.path / PROBE).read_text() == staging.token:
            return
    raise ConfigError(
        f"{staging.target}: this rank does not see the folder that rank 0 made: it looked for {staging.path}, rank 0 "
        f"made {made}. All ranks write into one folder: name the same folder on each, on a file system that they share"
    )


def put_beside(staging: Staging, scratch: Path) -> None:
    """Copy all files below a folder into the staging folder, and have them reach the disk."""
    for path in sorted(scratch.rglob("*")):
        if path.is_file():
            copied = staging.path / path.relative_to(scratch)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
            _sync(copied)


def commit(staging: Staging, weights: Sequence[str]) -> None:
    """Let the staging folder take the place of its target. See [Note: all at once].

    Its files are complete and on the disk. `weights` are the paths in it of the files of weights.
    """
    try:
        for below, _, _ in os.walk(staging.path):
            _sync(Path(below))
        stale = _stale(weights)
        if staging.is_inside:
            _replace_inside(staging, stale)
            return
        try:
            former = _take_place(staging)
        except OSError:  # EXDEV of overlayfs, EPERM in a sticky folder of another user: its files can be replaced
            _replace_inside(staging, stale)
            return
        (staging.target / PROBE).unlink(missing_ok=True)
        _sync(staging.target.parent)
        if former is not None:
            _move_over(former, staging.target, stale)
            _remove(former, staging)
    except OSError as error:
        raise ConfigError(f"{staging.target}: the saved folder cannot take its place: {error}") from error


def discard(staging: Staging) -> None:
    """Remove the staging folder of a save that has failed."""
    if (staging.path / PROBE).exists():  # otherwise it is taking its place
        _remove(staging.path, staging)


def _make_file(path: Path, file: FileLayout) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as opened:
            # Without blocks ext4 allocates them while several ranks write pieces of the file, which is slower.
            # Not os.posix_fallocate: where the file system cannot allocate (NFS 3), it writes a byte to each block.
            length = ctypes.c_int64(file.nbytes)
            number = _call("fallocate", opened.fileno(), 0, ctypes.c_int64(0), length) if file.nbytes else 0
            if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise OSError(number, os.strerror(number))
            if number:
                os.ftruncate(opened.fileno(), file.nbytes)
            for offset, data in {0: file.header, **file.others}.items():
                opened.seek(offset)
                opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be made, with {file.nbytes} bytes: {error}") from error


def _call(name: str, *arguments: Any) -> int:
    """Call a function of the C library; return 0 or the error number."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        return errno.ENOSYS
    return 0 if function(*arguments) == 0 else ctypes.get_errno()


def _finish_what_is_left(staging: Staging) -> None:
    """Finish earlier saves that were killed. Leave folders that may be the only copy of something."""
    target, place = staging.target, staging.path.parent
    for removed in place.glob(f"{glob.escape(staging.folder(_REMOVED).name)}*"):
        shutil.rmtree(removed, ignore_errors=True)
    for left in place.glob(f"{glob.escape(staging.folder(_SAVING).name)}*"):
        if not (left / PROBE).exists() and (left / _FORMER).exists():
            continue  # it has files that the target lacks; see `_replace_inside`
        if not (left / PROBE).exists() and target.is_dir():  # the former folder, exchanged already
            _move_over(left, target, _stale([path.name for path in target.iterdir() if _is_of_weights(path.name)]))
        _remove(left, staging)
    # A save that was killed right after the exchange left it. It must not be in what the next exchange takes away.
    (target / PROBE).unlink(missing_ok=True)


def _remove(folder: Path, staging: Staging) -> None:
    """Delete a folder. It is renamed first, so that the next save deletes what is left of it, and takes nothing."""
    removed = staging.folder(_REMOVED + folder.name.rpartition("-")[2])
    with contextlib.suppress(OSError):
        os.rename(folder, removed)
        shutil.rmtree(removed, ignore_errors=True)


def _can_be_renamed(folder: Path) -> bool:
    works_there = folder in (cwd := Path(os.path.realpath(os.getcwd())), *cwd.parents)
    has_mounts = any(map(os.path.ismount, (folder, *folder.iterdir())))
    return not has_mounts and not works_there and os.access(folder.parent, os.W_OK | os.X_OK)


def _take_place(staging: Staging) -> Path | None:
    """Rename the staging folder to its target; return the new path of the former folder, if any. All or nothing."""
    if not staging.target.exists() or not any(staging.target.iterdir()):
        os.rename(staging.path, staging.target)
        return None
    paths = os.fsencode(staging.path), os.fsencode(staging.target)
    number = _call("renameat2", _AT_CWD, paths[0], _AT_CWD, paths[1], _EXCHANGE)  # both at once
    if number == 0:
        return staging.path
    if number not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise OSError(number, os.strerror(number), str(staging.target))
    ready, former = staging.folder(f"ready-{staging.token}"), staging.folder(f"former-{staging.token}")
    os.rename(staging.path, ready)  # from here on no other save may remove it
    try:
        os.rename(staging.target, former)
    except OSError:
        os.rename(ready, staging.path)
        raise
    os.rename(ready, staging.target)
    return former


def _move_over(former: Path, new: Path, stale: re.Pattern[str]) -> None:
    """Move what only the former folder has, except weights that the new ones replace."""
    for entry in sorted(former.iterdir()):
        place = new / entry.name
        if entry.is_dir() and not entry.is_symlink() and place.is_dir():
            _move_over(entry, place, stale)
        elif not os.path.lexists(place) and not stale.fullmatch(entry.name):
            os.rename(entry, place)


def _replace_inside(staging: Staging, stale: re.Pattern[str]) -> None:
    former = staging.path / _FORMER
    former.mkdir()
    (staging.path / PROBE).unlink()  # from here on no other save may remove it
    names = [path.relative_to(staging.path) for path in sorted(staging.path.rglob("*")) if path.is_file()]
    # Single files and indexes are what loaders look for: away first, and back last.
    names.sort(key=lambda name: (_opens(name.name), name))
    gone = {entry.name for entry in staging.target.iterdir() if stale.fullmatch(entry.name)}
    for old in sorted(gone, key=lambda old: (not _opens(old), old)):
        os.rename(staging.target / old, former / old)
    _sync(staging.target)
    for name in names:
        (staging.target / name).parent.mkdir(parents=True, exist_ok=True)
        os.rename(staging.path / name, staging.target / name)
    _sync(staging.target)
    _remove(staging.path, staging)


def _is_of_weights(name: str) -> bool:
    return re.search(r"\.(safetensors|bin)\b", name) is not None


def _opens(name: str) -> bool:
    return _is_of_weights(name) and re.search(_SHARD, name) is None


def _stale(weights: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of the names that an earlier save may have given the same weights: shards, one file, index."""
    patterns = [re.escape(PROBE)]
    for name in weights:
        stem, suffix = map(re.escape, os.path.splitext(re.sub(_SHARD, "", os.path.basename(name))))
        base, dot, variant = stem.partition(r"\.")
        patterns.append(f"{stem}({_SHARD})?{suffix}")
        patterns.append(rf"{base}{suffix}\.index{dot}{variant}\.json")
    return re.compile("|".join(patterns))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write the two files of PEFT's `save_pretrained` that engines read, in the place of former ones."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".{_SAVING}{secrets.token_hex(8)}"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, staging, metadata={"format": "pt"})
    staging.replace(folder / "adapter_model.safetensors")
    staging.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    staging.replace(folder / "adapter_config.json")
