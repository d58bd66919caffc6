"""Local folders that stand for checkpoints in remote stores, as this process knows them, and how to open any file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lowmem_load.io.remote_file import RemoteFile, RemoteObject
from lowmem_load.io.source import ByteSource, LocalFile

URL_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https")

HEADS = ".heads"
"""Folder beside the empty files that has the first bytes of the remote ones."""

_objects: dict[str, RemoteObject] = {}  # by name, and by the path of the empty file that stands for it
_places: dict[str, str] = {}  # paths of these empty files, by the name of the remote file
_origins: dict[str, str] = {}  # URL or Hub id of each folder


def is_url(name: object) -> bool:
    """Return whether a name is a URL in a remote store."""
    return isinstance(name, str) and "://" in name and name.partition("://")[0].lower() in URL_SCHEMES


def plain_url(url: str) -> str:
    """Return a URL without credentials, query and fragment; only its scheme if it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # else the path may begin within a password
    except ValueError:
        return f"{url.partition('://')[0]}://..."
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def note_folder(folder: str, origin: str, objects: Mapping[str, RemoteObject]) -> None:
    """Note that a folder stands for a URL or Hub id. `objects` are its remote files, by the paths of the empty ones."""
    _origins[os.path.abspath(folder)] = origin
    for path, item in objects.items():
        _objects[path] = _objects[item.name] = item
        _places[item.name] = path


def open_file(path: str) -> ByteSource:
    """Open a local file, or the remote one that an empty file stands for, or that has this name."""
    item = _objects.get(path) or _objects.get(os.path.abspath(path))
    if item is None:
        return LocalFile(path)
    head = head_of(_places[item.name] if is_url(path) else os.path.abspath(path))
    return RemoteFile(item, Path(head).read_bytes() if os.path.isfile(head) else b"")


def head_of(path: str) -> str:
    """Return the path of a file with the first bytes of the remote file that an empty one stands for."""
    folder, name = os.path.split(path)
    return os.path.join(folder, HEADS, name)


def origin_of(folder: str) -> str:
    """Return the URL or Hub id that a folder stands for; the folder, if it is an ordinary one, or the plain URL."""
    if is_url(folder):
        return plain_url(folder)
    return _origins.get(os.path.abspath(folder), folder)


@contextlib.contextmanager
def origins_named() -> Iterator[None]:
    """Have errors that leave the block name URLs and Hub ids in place of the folders that stand for them."""
    try:
        yield
    except BaseException as error:
        name_origins(error)
        raise


def name_origins(error: BaseException | None) -> None:
    """Let an error, and those that led to it, name URLs and Hub ids in place of the folders that stand for them."""
    while error is not None:
        error.args = tuple(map(_with_origins, error.args))
        if isinstance(error, OSError) and error.filename is not None:  # its text changes once it is set, also to None
            error.filename = _with_origins(error.filename)
        error = error.__cause__ or error.__context__


def _with_origins(value: Any) -> Any:
    for folder, origin in _origins.items() if isinstance(value, str) else ():
        value = value.replace(folder, origin)
    return value


def is_stand_in(folder: str) -> bool:
    """Return whether a folder stands for a remote checkpoint."""
    return os.path.abspath(folder) in _origins
