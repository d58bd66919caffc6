"""A folder of which loaders see one save or the other.

[Note: all at once] A save writes to a staging folder of another name. When everything in it has reached the disk, it
becomes the target by one rename. A folder that exists already is kept, with its owner, group, access lists, stripes and
quotas: there the staging folder lies inside, and the files are replaced one by one. Those that loaders look for go away
first and come back last. So a folder never loads a mixture of two saves, whose shards have the same names and shapes:
that would be wrong weights without an error. A save that is killed between the two leaves a folder that does not load,
with all files in it, and the next save finishes the replacement.
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
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.files.stand_ins import is_url
from lowmem_load.text import is_http, plain_url, size
from lowmem_load.weights_out.weight_files import FileLayout

PROBE = ".lowmem_load_probe"
"""File by which ranks tell that they see one folder. It marks the staging folder of a save that has not ended."""

_SAVING = "saving-"
"""Part of the name of a staging folder."""

_FORMER, _REPLACING = ".former", ".replacing"
"""Folder in a staging folder, for files of the target that the new ones replace, and its name when all are there."""

_WEIGHTS = re.compile(r"(.+?)(-\d{5}-of-\d{5})?\.(safetensors|bin)(?:\.index(\..+)?\.json)?")
"""The name of a file of weights, of one of several, or of their index, which has the variant at another place."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""How a URL begins, also one of which `pathlib` has made a path."""


@dataclass(frozen=True, slots=True)
class Staging:
    """The folder that files are written to first, as this rank knows it: nodes may have the disk under other paths."""

    target: Path  # the folder that the files are meant for, without symbolic links
    token: str  # random text of this save, in the name of the staging folder and in the probe file
    is_inside: bool  # whether the staging folder lies in the target, because that was there

    @property
    def path(self) -> Path:
        """The staging folder, next to the target or inside it."""
        name = _SAVING + self.token
        return self.target / f".{name}" if self.is_inside else self.target.with_name(f".{self.target.name}.{name}")


def find_target(folder: str | os.PathLike[str]) -> str:
    """Return the folder of a save, without symbolic links, or in a store; raise ConfigError for a file or other URL."""
    if is_in_store(folder):
        url = urlsplit(os.fspath(folder))
        if url.query or url.fragment:  # which are no part of a plain URL: the save would go to another folder
            raise ConfigError(f"{plain_url(url.geturl())}...: the name of a folder in a store has no '?' and no '#'")
        return url.geturl()
    refuse_url(folder)
    target = os.path.realpath(folder)
    # One look: whoever saves or tidies up may rename or remove it now.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if not stat.S_ISDIR(os.stat(target).st_mode):
            raise ConfigError(f"{folder}: is a file; name a folder")
    return target


def is_in_store(folder: object) -> bool:
    """Return whether a folder is in an object store that takes files."""
    return is_url(folder) and not is_http(str(folder))


def refuse_url(folder: str | os.PathLike[str]) -> None:
    """Raise ConfigError if what shall be written to is a URL, of which the system would make a folder of that name."""
    if _URL.match(os.fsdecode(folder)):
        raise ConfigError(
            f"{plain_url(os.fsdecode(folder))}: is a URL that cannot be written to here: lowmem_load.save_model and "
            "consolidate write to s3://, gs:// and az://, named as text; call these, or name a folder and copy it"
        )


def make_staging(folder: str, files: Sequence[FileLayout]) -> Staging:
    """Make a staging folder for a target with files; finish or remove what killed saves to the target have left.

    The files have their full length, and everything but the tensors' data. Raises ConfigError if the folder cannot be
    made, or the disk is too small.
    """
    target = Path(folder)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _finish_what_is_left(target)
        staging = Staging(target, secrets.token_hex(4), is_inside=target.is_dir())
        needed_bytes = sum(file.nbytes for file in files)
        free_bytes = shutil.disk_usage(staging.path.parent).free
        if free_bytes < needed_bytes:
            former = " next to the former files, which stay until the new ones are complete" if target.is_dir() else ""
            raise ConfigError(
                f"{target}: needs {size(needed_bytes)}{former}, but {size(free_bytes)} are free; nothing was written. "
                "Free space, remove the former files first, or save to another folder"
            )
        staging.path.mkdir()
        try:
            (staging.path / PROBE).write_text(f"{staging.token} {os.getpid()} {os.uname().nodename}")
            for file in files:
                _make_file(staging.path / file.name, file)
        except BaseException:
            shutil.rmtree(staging.path, ignore_errors=True)
            raise
    except OSError as error:
        raise ConfigError(f"{target}: cannot be saved to: {error}") from error
    return staging


def check_seen(staging: Staging, made: str) -> None:
    """Raise ConfigError unless this rank sees the staging folder that rank 0 made, whose path there is `made`."""
    with contextlib.suppress(OSError):
        if (staging.path / PROBE).read_text().split()[:1] == [staging.token]:
            return
    raise ConfigError(
        f"{staging.target}: this rank does not see the folder that rank 0 made: it looked for {staging.path}, rank 0 "
        f"made {made}. All ranks write into one folder: name the same folder on each, on a file system that they share"
    )


def add_files(staging: Staging, scratch: Path) -> None:
    """Copy all files below a folder into the staging folder, and have them reach the disk."""
    for path in sorted(scratch.rglob("*")):
        if path.is_file():
            copied = staging.path / path.relative_to(scratch)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
            _sync(copied)


def commit(staging: Staging) -> None:
    """Let the staging folder take the place of its target. See [Note: all at once].

    Its files are complete and on the disk.
    """
    try:
        for below, _, _ in os.walk(staging.path):
            _sync(Path(below))
        if staging.target.exists():
            _replace(staging.path, staging.target)
        else:
            os.rename(staging.path, staging.target)
            (staging.target / PROBE).unlink(missing_ok=True)
            _sync(staging.target.parent)
    except OSError as error:
        raise ConfigError(f"{staging.target}: the saved folder cannot take its place: {error}") from error


def discard(staging: Staging) -> None:
    """Remove the staging folder of a save that has failed."""
    if not _is_taking_its_place(staging.path):
        shutil.rmtree(staging.path, ignore_errors=True)


def _make_file(path: Path, file: FileLayout) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as opened:
            # Without blocks ext4 allocates them while several ranks write pieces of the file, which is slower.
            # Not os.posix_fallocate: where the file system cannot allocate (NFS 3), it writes a byte to each block.
            fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
            if fallocate and fallocate(opened.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(file.nbytes)):
                number = ctypes.get_errno()
                if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise OSError(number, os.strerror(number))
            os.ftruncate(opened.fileno(), file.nbytes)
            for offset, data in {0: file.header, **file.constants}.items():
                opened.seek(offset)
                opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be made, with {file.nbytes} bytes: {error}") from error


def _finish_what_is_left(target: Path) -> None:
    """Finish the saves that were killed while they took their place, and remove those that were killed before."""
    for inside in (False, True):
        path = Staging(target, "", inside).path
        for left in path.parent.glob(f"{glob.escape(path.name)}*"):
            if _is_alive(left):
                continue
            if _is_taking_its_place(left):
                _replace(left, target)
            else:
                shutil.rmtree(left, ignore_errors=True)
    (target / PROBE).unlink(missing_ok=True)  # of a save that was killed right after it was renamed


def _is_alive(left: Path) -> bool:
    """Return whether another process of this machine, which still runs, makes a staging folder."""
    try:
        _, process, machine = (left / PROBE).read_text().split()
        if machine == os.uname().nodename and int(process) != os.getpid():
            os.kill(int(process), 0)
            return True
    except PermissionError:  # another user's
        return True
    except (OSError, ValueError):
        pass
    return False


def _is_taking_its_place(staging: Path) -> bool:
    return (staging / _FORMER).exists() or (staging / _REPLACING).exists()


def _replace(staging: Path, target: Path) -> None:
    """Move the files of a staging folder into the target, one by one, or go on with that. See [Note: all at once]."""
    hidden = (_FORMER, _REPLACING, PROBE)
    found = (path.relative_to(staging) for path in staging.rglob("*") if path.is_file())
    # Single files and indexes are what loaders look for: away first, and back last.
    names = sorted((name for name in found if name.parts[0] not in hidden), key=lambda name: (opens(name), name))
    if folders := [str(name) for name in names if (target / name).is_dir()]:
        raise IsADirectoryError(errno.EISDIR, "is a folder, where a file has to go", folders[0])
    if not (staging / _REPLACING).exists():  # no new file has come yet, so all that look like weights are old
        former = staging / _FORMER
        former.mkdir(exist_ok=True)
        for old in sorted(_replaced_by(names, target), key=lambda old: (not opens(old), old)):
            (former / old).parent.mkdir(parents=True, exist_ok=True)
            os.rename(target / old, former / old)
        _sync(target)
        os.rename(former, staging / _REPLACING)
        _sync(staging)
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.rename(staging / name, target / name)
    for folder in {(target / name).parent for name in names}:
        _sync(folder)
    shutil.rmtree(staging, ignore_errors=True)


def _replaced_by(names: Sequence[Path], target: Path) -> set[Path]:
    """Return the files of the target that are of an earlier save of the same weights as these: shards, file, index."""
    found: list[Path] = []
    for folder in {name.parent for name in names}:
        with contextlib.suppress(FileNotFoundError):
            found += [folder / old.name for old in (target / folder).iterdir()]
    return of_same_weights(names, found)


def of_same_weights(names: Iterable[Path], found: Iterable[Path]) -> set[Path]:
    """Return those of the files found that have weights which some of `names` have, too: shards, file, index."""
    saved = {name.parent / weights for name in names if (weights := _weights_in(name.name))}
    return {old for old in found if old.parent / _weights_in(old.name) in saved}


def _weights_in(name: str) -> str:
    """Return the name that a file of weights would have if it were the only one; "" for a file without weights."""
    match = _WEIGHTS.fullmatch(name)
    return f"{match[1]}{match[4] or ''}.{match[3]}" if match else ""


def opens(path: Path) -> bool:
    """Return whether loaders look for a file: a single one, or an index."""
    match = _WEIGHTS.fullmatch(path.name)
    return match is not None and match[2] is None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
