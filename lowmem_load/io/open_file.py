"""Opens local files, and the remote ones for which empty files stand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowmem_load.io.remote_file import RemoteFile, RemoteObject
from lowmem_load.io.source import ByteSource, LocalFile
from lowmem_load.io.stand_ins import head_of, manifest_of, secret_of


def open_file(path: str) -> ByteSource:
    """Open a local file, or the remote one that an empty file stands for."""
    manifest, file = manifest_of(path) or ({"origin": "", "files": {}}, "")
    entry = manifest["files"].get(file)
    if entry is None:
        return LocalFile(path)
    head = head_of(os.path.abspath(path))
    first = Path(head).read_bytes() if os.path.isfile(head) else b""
    return RemoteFile(_object_of(entry, secret_of(manifest["origin"])), first, path)


def _object_of(entry: Mapping[str, Any], secret: str | None) -> RemoteObject:
    """Return the file of an entry of a manifest."""
    from lowmem_load.io import http_files, object_store

    url, nbytes, version = str(entry["url"]), int(entry["size"]), str(entry["etag"])
    if entry["store"]:
        return object_store.StoreObject(url, str(entry["key"]), nbytes, version, unsigned=bool(entry["unsigned"]))
    if entry["hub"]:
        return http_files.hub_object(url, nbytes, version, secret)
    return http_files.HttpObject(http_files.with_secret(url, secret), nbytes, version)
