"""Local folders that stand for checkpoints in remote stores.

A stand-in is a folder `lowmem_load-UID/NAME-DIGEST/NAME` of the temporary one, which only this user may enter. It has
the small files. In place of each other one it has a file with the first bytes of a safetensors file, or an empty one.
The manifest next to it says where those are, so any process can open them. It has no credentials: only the process that
was given those of a URL, or a `token=`, knows them. The digest is that of the names and versions of the files, so the
ranks of a node share the folder, and the first one fills it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock, Timeout

from lowmem_load.errors import CheckpointError
from lowmem_load.files.object_store import RemoteObject
from lowmem_load.files.remote_file import CHECK_S, HEAD_BYTES, Check, RemoteFile, map_in_threads
from lowmem_load.files.source import ByteSource, LocalFile, read_bytes
from lowmem_load.text import fingerprint, plain_url

URL_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https")

MANIFEST = "files.json"
"""File next to the stand-in."""

ENTRY = ("url", "key", "nbytes", "version", "written", "unsigned", "on_hub")
"""What the manifest has of a `RemoteObject`."""

MAX_FILES = 4096
"""Most files of a checkpoint: twenty times as many as the largest published ones have."""

MAX_SMALL_NBYTES = 64 << 20
"""Most bytes of a file of which all are fetched, such as an index."""

MAX_SMALL_NBYTES_IN_ALL = 256 << 20
"""Most bytes of all these files."""

SMALL = (".json", ".py", ".sha256", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe", "SHA256SUMS")
"""Ends of their names: configurations, tokenizers, code, checksums."""

Listing: TypeAlias = Mapping[str, RemoteObject]
"""Files by their path in the checkpoint: "config.json", "subfolder/config.json"."""

Fetch: TypeAlias = Callable[[str, RemoteObject], bytes]
"""Returns the content of a small file, given its path in the checkpoint."""

secrets: dict[str, str | None] = {}
"""What this process needs to open files: a URL with credentials, or a token, by the URL without them or the Hub id."""


def is_url(name: object) -> bool:
    """Return whether a name is a URL in a remote store."""
    return isinstance(name, str) and "://" in name and name.partition("://")[0].lower() in URL_SCHEMES


def cache_folder() -> str:
    """Return the path of this user's folder of stand-ins."""
    return os.path.join(tempfile.gettempdir(), f"lowmem_load-{os.getuid()}")


def manifest_of(path: str) -> tuple[dict[str, Any], str] | None:
    """Return the manifest of the stand-in that a path is in, and the path within it; None if it is not in one."""
    base = cache_folder()
    inside = os.path.relpath(os.path.abspath(path), base).split(os.sep)
    if len(inside) < 2 or inside[0] == os.pardir:
        return None
    try:
        status = os.lstat(base)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            return None  # what others may write there says nothing
        path = os.path.join(base, inside[0], MANIFEST)
        made = os.stat(path)
        return _manifest(path, made.st_ino, made.st_mtime_ns), "/".join(inside[2:])
    except (OSError, ValueError):
        return None


@functools.lru_cache(maxsize=4)  # each file asks several times, and 2,048 files take 5 ms
def _manifest(path: str, *_: int) -> dict[str, Any]:
    return dict(json.loads(Path(path).read_text(encoding="utf-8")))


def is_stand_in(path: str) -> bool:
    """Return whether a folder, or a file in it, stands for a remote one."""
    return manifest_of(path) is not None


def origin(path: str) -> str:
    """Return the URL or Hub id that a folder, or a file in it, stands for; any other path, or a plain URL, as it is."""
    if is_url(path):
        return plain_url(path)
    found = manifest_of(path)
    return path if found is None else "/".join(filter(None, (found[0]["origin"], found[1])))


def written_at(path: str) -> float | None:
    """Return when the file that one stands for was written, as its store says; None for any other file."""
    manifest, file = manifest_of(path) or ({"files": {}}, "")
    entry = manifest["files"].get(file)
    return None if entry is None else float(entry["written"])


# -- its files ---------------------------------------------------------------------------------------------------------


def open_file(path: str) -> ByteSource:
    """Open a local file, or the remote one that a file stands for."""
    manifest, file = manifest_of(path) or ({"origin": "", "files": {}}, "")
    entry = manifest["files"].get(file)
    if entry is None:
        return LocalFile(path)
    item = RemoteObject(**entry, secret=secrets.get(manifest["origin"]))
    return RemoteFile(item, Path(path).read_bytes(), path)


def read_front(item: RemoteObject, nbytes: int) -> bytes:
    """Return the first bytes of a remote file."""
    return read_bytes(RemoteFile(item), 0, nbytes)


def is_plain_path(path: str) -> bool:
    """Return whether this may be the path of a file in a checkpoint: it does not lead out of it."""
    return all(map(_is_plain, path.split("/")))


def _is_plain(name: str) -> bool:
    """Return whether this may be the name of a file: names are untrusted."""
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:  # half of a surrogate pair, from JSON
        return False
    is_name = name not in ("", ".", "..") and nbytes <= 255  # as on most file systems
    return is_name and not any(character in name for character in ("/", "\\", "\0", "?", "#"))


def readable_name(url: str, lines: Iterable[str]) -> str:
    """Return a name for a file or folder with the end of a URL and the digest of lines."""
    readable = re.sub(r"[^\w.-]+", "-", url, flags=re.ASCII).strip("-.")[-100:]
    return f"{readable}-{fingerprint(lines)}"


def lay_out(origin: str, listing: Listing, fetch: Fetch, check: Check, *, tokenizers: bool = True) -> str:
    """Return the folder for a listing, filled by this process or by another one of this user."""
    small = {file for file, item in listing.items() if _is_small(file, item, tokenizers=tokenizers)}
    small_nbytes = sum(listing[file].nbytes for file in small)
    if len(listing) > MAX_FILES or small_nbytes > MAX_SMALL_NBYTES_IN_ALL:
        raise CheckpointError(
            f"{origin}: has {len(listing)} files, and {small_nbytes} bytes in small ones; expected at most {MAX_FILES} "
            f"and {MAX_SMALL_NBYTES_IN_ALL}; name the folder of one checkpoint"
        )
    for file in listing:
        if not is_plain_path(file):  # it would leave the folder
            raise CheckpointError(f"{origin}: lists a file with the impossible name {file[:80]!r}")
    lines = [
        f"{file} {item.name} {item.nbytes} {item.version} {item.written}" for file, item in sorted(listing.items())
    ]
    base, last = _own_folder(), origin.rpartition("/")[2]
    place = os.path.join(base, readable_name(origin, [origin, *lines]))
    folder = os.path.join(place, last if _is_plain(last) else "model")
    large = {file: item for file, item in listing.items() if file not in small}
    entries = {file: {field: getattr(item, field) for field in ENTRY} for file, item in large.items()}
    manifest = json.dumps({"origin": origin, "files": entries}, indent=1)
    heads = {file: min(HEAD_BYTES, item.nbytes) for file, item in large.items() if file.endswith(".safetensors")}
    sizes = {file: listing[file].nbytes if file in small else heads.get(file, 0) for file in listing}
    paths = {os.path.join(folder, file): nbytes for file, nbytes in sizes.items()}
    with _locked(f"{place}.lock", check):
        is_full = all(os.path.isfile(path) and os.path.getsize(path) == nbytes for path, nbytes in paths.items())
        if not is_full or not os.path.isfile(os.path.join(place, MANIFEST)):
            _remove(place)  # a cleaner of old files may have been at work

            def content(file: str) -> bytes:
                return fetch(file, listing[file]) if file in small else read_front(listing[file], sizes[file])

            _fill_folder(folder, listing, content, check, manifest)
    return folder


@contextlib.contextmanager
def _locked(path: str, check: Check) -> Iterator[None]:
    """Have a lock of this user's processes. While another one has it, `check` is called, and may raise."""
    lock = FileLock(path)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=CHECK_S)
        except Timeout:
            check()
    try:
        yield
    finally:
        lock.release()


def _remove(folder: str) -> None:
    """Delete a folder under another name: threads that still write into it find it gone."""
    with contextlib.suppress(OSError):
        gone = f"{folder}.gone"
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _is_small(file: str, item: RemoteObject, *, tokenizers: bool) -> bool:
    name = file.rpartition("/")[2]
    is_wanted = tokenizers or not name.startswith(("tokenizer", "vocab", "merges"))
    return name.endswith(SMALL) and item.nbytes <= MAX_SMALL_NBYTES and is_wanted


def _fill_folder(
    folder: str, files: Iterable[str], content: Callable[[str], bytes], check: Check, manifest: str
) -> None:
    target, last = os.path.split(folder)
    base = os.path.dirname(target)
    made = tempfile.mkdtemp(dir=base)

    def fill(file: str) -> None:
        path = Path(made, last, file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(file))

    try:
        map_in_threads(fill, files, check)
        Path(made, MANIFEST).write_text(manifest, encoding="utf-8")
        os.rename(made, target)  # all of it is there at once, or nothing
    except BaseException as error:
        _remove(made)
        if isinstance(error, OSError):
            raise CheckpointError(f"{base}: small files of a checkpoint cannot be written there: {error}") from error
        raise


def _own_folder() -> str:
    """Return a folder of this user in the temporary one, which nobody else may write to."""
    base = cache_folder()
    os.makedirs(base, mode=0o700, exist_ok=True)
    status = os.lstat(base)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise CheckpointError(f"{base}: belongs to another user, or others may write to it; remove it")
    return base
