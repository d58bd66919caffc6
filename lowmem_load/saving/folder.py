"""A folder that appears all at once: what is saved is gathered in another one, which then takes its place.

[Note: all at once] A save goes to a folder of another name beside the one that is meant. Once all of it has reached the
disk, the two are exchanged by one system call (`renameat2`; where the file system lacks it, by two renames), and what
the former folder had besides is moved over. So whenever a save ends, also by a signal or with the machine, there is the
former folder or the new one, and never a mixture of both, which would load wrongly without an error: their shards have
the same names and shapes. A folder that cannot be renamed (one that is or has a mount point, that this process works
in, whose parent it may not write, of a lower layer of overlayfs) is changed inside: what would make it load is taken
away first and comes back last, so that for the moment of these renames it loads not at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from lowmem_load.errors import ConfigError

PROBE = ".lowmem_load_probe"
"""File by which ranks tell that they see one folder. A folder that has it is of a save that has not ended."""

EMPTY: Mapping[int, bytes] = MappingProxyType({})

_SAVING, _REMOVED = "saving-", "removed-"
"""What names of folders have in them: of those that are filled, and of those that are on their way out."""

_FORMER = ".former"
"""Folder, in one that is emptied into its target, for what the target had under the same names."""

_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_AT_CWD = -100  # AT_FDCWD of linux/fcntl.h


@dataclass(frozen=True, slots=True)
class Staging:
    """Where files lie until they take their places.

    Attributes:
        path: of the folder that holds them.
        target: of the folder that they are meant for.
        token: that ranks look for in the probe.
    """

    path: Path
    target: Path
    token: str

    @property
    def is_inside(self) -> bool:
        """Whether it lies in the folder itself, which cannot be renamed."""
        return self.path.parent == self.target

    @property
    def removed(self) -> str:
        """Name of what nobody needs any more, by which the next save can tell if this one is killed."""
        return self.path.name.replace(_SAVING + self.token, _REMOVED + self.token)


def make_staging(folder: str | os.PathLike[str], needed_bytes: int) -> Staging:
    """Make an empty folder for a save; remove what earlier saves to the same place, which were killed, have left.

    Raises:
        ConfigError: it cannot be made, or too little is free there.
    """
    target = Path(os.path.realpath(folder))
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{folder}: is a file; name a folder")
    token = secrets.token_hex(4)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        inside = target.is_dir() and not _can_be_renamed(target)
        place = target if inside else target.parent
        prefix = "." if inside else f".{target.name}."
        _finish_what_is_left(target, place, prefix)
        free_bytes = shutil.disk_usage(place).free
        if free_bytes < needed_bytes:
            beside = " beside the former files, which stay until the new ones are complete" if target.is_dir() else ""
            raise ConfigError(
                f"{folder}: needs {needed_bytes} bytes{beside}, but {free_bytes} are free; nothing was written. Free "
                "space, remove the former files first, or save to another folder"
            )
        path = place / f"{prefix}{_SAVING}{token}"
        path.mkdir()
        try:
            (path / PROBE).write_text(token)
            if target.is_dir():
                shutil.copymode(target, path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be saved to: {error}") from error
    return Staging(path, target, token)


def check_seen(staging: Staging) -> None:
    """Raise ConfigError unless this rank sees what rank 0 has put into the staging folder."""
    with contextlib.suppress(OSError):
        if (staging.path / PROBE).read_text() == staging.token:
            return
    raise ConfigError(
        f"{staging.target}: this rank does not see the folder that rank 0 made there ({staging.path.name}), so it is "
        "on a disk of another machine; all ranks write into one folder: name one on a file system that they share"
    )


def make_file(staging: Staging, name: str, header: bytes, nbytes: int, others: Mapping[int, bytes] = EMPTY) -> None:
    """Make a file of its full length, with its first bytes and others. What is not written later stays zero."""
    path = staging.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(header)
        for start, data in others.items():
            file.seek(start)
            file.write(data)
        file.truncate(nbytes)
        file.flush()
        os.fsync(file.fileno())


def put_beside(staging: Staging, scratch: Path) -> list[str]:
    """Copy all files below a folder into the staging folder, and have them reach the disk; return their paths in it."""
    names = []
    for path in sorted(scratch.rglob("*")):
        if path.is_file():
            name = path.relative_to(scratch)
            (staging.path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, staging.path / name)
            _sync(staging.path / name)
            names.append(name.as_posix())
    return names


def commit(staging: Staging, weights: Sequence[str]) -> None:
    """Let the staging folder take its place. See [Note: all at once].

    Its files are complete, and on the disk; `weights` are paths in it of the files of weights.

    Raises:
        ConfigError: the folder was replaced or removed meanwhile, or cannot be renamed.
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
        except OSError:  # EXDEV of overlayfs, EPERM below a sticky folder of somebody else's: files may be replaced
            _replace_inside(staging, stale)
            return
        (staging.target / PROBE).unlink(missing_ok=True)
        _sync(staging.target.parent)
        if former is not None:
            _move_over(former, staging.target, stale)
            _remove(former, staging.removed)
    except OSError as error:
        raise ConfigError(f"{staging.target}: what was saved cannot take its place: {error}") from error


def discard(staging: Staging) -> None:
    """Remove the staging folder of a save that has failed."""
    if (staging.path / PROBE).exists():  # else it is on its way to its place
        shutil.rmtree(staging.path, ignore_errors=True)


def _finish_what_is_left(target: Path, place: Path, prefix: str) -> None:
    """Finish what saves to the target did not, which were killed; leave what may be the only copy of something."""
    for removed in place.glob(f"{glob.escape(prefix + _REMOVED)}*"):
        shutil.rmtree(removed, ignore_errors=True)
    for left in place.glob(f"{glob.escape(prefix + _SAVING)}*"):
        if not (left / PROBE).exists() and (left / _FORMER).exists():
            continue  # it has what the folder lacks; see `_replace_inside`
        if not (left / PROBE).exists() and target.is_dir():  # the former folder, exchanged already
            _move_over(left, target, _stale([path.name for path in target.glob("*.safetensors")]))
        _remove(left, f"{prefix}{_REMOVED}{left.name.rpartition('-')[2]}")
    # Of a save that was killed right after the exchange. It must not be in what the next exchange takes away.
    (target / PROBE).unlink(missing_ok=True)


def _remove(folder: Path, name: str) -> None:
    """Remove a folder that nobody needs, under a name that says so; see `Staging.removed`."""
    removed = folder.with_name(name)
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def _can_be_renamed(folder: Path) -> bool:
    works_there = folder in (cwd := Path(os.path.realpath(os.getcwd())), *cwd.parents)
    has_mounts = any(map(os.path.ismount, (folder, *folder.iterdir())))  # those could not be moved over
    return not has_mounts and not works_there and os.access(folder.parent, os.W_OK | os.X_OK)


def _take_place(staging: Staging) -> Path | None:
    """Rename the staging folder to its target; return what the former folder is called now, if there was one.

    Raises:
        OSError: the target cannot be renamed. Nothing has changed.
    """
    if not staging.target.exists() or not any(staging.target.iterdir()):
        os.rename(staging.path, staging.target)
        return None
    if _exchange(staging.path, staging.target):
        return staging.path
    ready, former = (
        staging.target.with_name(f".{staging.target.name}.{state}-{staging.token}") for state in ("ready", "former")
    )
    os.rename(staging.path, ready)  # from here on nothing may remove it as what a killed save has left
    try:
        os.rename(staging.target, former)
    except OSError:
        os.rename(ready, staging.path)
        raise
    os.rename(ready, staging.target)
    return former


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders at once; return False where the system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _move_over(former: Path, new: Path, stale: re.Pattern[str]) -> None:
    """Move what only the former folder has, but for weights that the new ones take the place of."""
    for entry in sorted(former.iterdir()):
        place = new / entry.name
        if entry.is_dir() and not entry.is_symlink() and place.is_dir():
            _move_over(entry, place, stale)
        elif not os.path.lexists(place) and not stale.fullmatch(entry.name):
            os.rename(entry, place)


def _replace_inside(staging: Staging, stale: re.Pattern[str]) -> None:
    former = staging.path / _FORMER
    former.mkdir()
    (staging.path / PROBE).unlink()  # from here on nothing may remove it as what a killed save has left
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
    _remove(staging.path, staging.removed)


def _opens(name: str) -> bool:
    """Whether loaders begin with a file of this name."""
    return "safetensors" in name and re.search(r"-\d{5}-of-\d{5}", name) is None


def _stale(weights: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of the names of files that these weights take the place of."""
    return re.compile("|".join((re.escape(PROBE), *_stale_patterns(weights))))


def _stale_patterns(weights: Sequence[str]) -> Iterator[str]:
    """Yield patterns of the names under which an earlier save may have left the same weights: shards, single, index."""
    for name in weights:
        stem = re.sub(r"-\d{5}-of-\d{5}", "", os.path.basename(name)).removesuffix(".safetensors")
        base, _, variant = stem.partition(".")
        yield rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors"
        yield rf"{re.escape(base)}\.safetensors\.index{re.escape('.' + variant if variant else '')}\.json"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
