"""Local folders that stand for checkpoints in remote stores.

A stand-in is a folder `lowmem_load-UID/NAME-DIGEST/NAME` of the temporary one, which only this user may enter. It has
the small files, and an empty file for each other one. The manifest beside it says where those are, so any process
opens them. Credentials are not in it: those of a URL, and a `token=`, are known to the process that was given them.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

URL_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https")

HEADS, MANIFEST = ".heads", "manifest.json"
"""Folder beside the empty files that has the first bytes of the remote ones; file beside the stand-in."""

_secrets: dict[str, str] = {}  # a URL with credentials, or a token, by the URL without them or the Hub id


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


def note_secret(origin: str, secret: str | None) -> None:
    """Keep what this process needs to open the files of a URL or Hub id; None: nothing."""
    if secret is None:
        _secrets.pop(origin, None)
    else:
        _secrets[origin] = secret


def cache_folder() -> str:
    """Return the path of this user's folder of stand-ins."""
    return os.path.join(tempfile.gettempdir(), f"lowmem_load-{os.getuid()}")


def manifest_of(path: str) -> tuple[dict[str, Any], str] | None:
    """Return the manifest of the stand-in that a path is in, and the path inside of it; None if it is in none."""
    base = cache_folder()
    inside = os.path.relpath(os.path.abspath(path), base).split(os.sep)
    if len(inside) < 2 or inside[0] == os.pardir:
        return None
    try:
        status = os.lstat(base)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            return None  # what others may write there says nothing
        return json.loads(Path(base, inside[0], MANIFEST).read_text(encoding="utf-8")), "/".join(inside[2:])
    except (OSError, ValueError):
        return None


def is_stand_in(path: str) -> bool:
    """Return whether a folder, or a file in it, stands for a remote one."""
    return manifest_of(path) is not None


def origin(path: str) -> str:
    """Return the URL or Hub id that a folder, or a file in it, stands for; any other path, or a plain URL, as it is."""
    if is_url(path):
        return plain_url(path)
    found = manifest_of(path)
    return path if found is None else "/".join(filter(None, (found[0]["origin"], found[1])))


def secret_of(origin: str) -> str | None:
    """Return what `note_secret` has kept."""
    return _secrets.get(origin)


def head_of(path: str) -> str:
    """Return the path of a file with the first bytes of the remote file that an empty one stands for."""
    folder, name = os.path.split(path)
    return os.path.join(folder, HEADS, name)
