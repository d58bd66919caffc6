"""What is known of the bytes of a file: from the cache of the Hub, or from files beside it. All of it is small.

Source of the Hub's forms: huggingface_hub 2.4.0, `file_download.py`, `_local_folder.py`, `utils/_shared_blobs.py`. A
file of a repository has an ETag: the SHA-256 of its bytes if it is kept by LFS or Xet, as weights are, else the SHA-1
by which git names it. The cache names blobs by it, and a download to a local folder writes it down.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lowmem_load.errors import CheckpointError
from lowmem_load.io.source import LocalFile, read_bytes

GIT, SHA256 = "git's sha1", "sha256"
"""Algorithms. Git names a file by a SHA-1 of its size and bytes."""

MAX_NBYTES = 16 << 20
"""Bytes of a file of checksums: some 100,000 lines."""

MAX_LINKS = 40
"""That are followed to a blob: as many as Linux does."""

_ALGORITHM_OF = {64: SHA256, 40: GIT}
_DIGEST = re.compile(r"(?:[0-9a-f]{64}|[0-9a-f]{40})")
_LINE = re.compile(r"(?P<escaped>\\?)(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>.+)")
_TAGGED_LINE = re.compile(r"(?P<escaped>\\?)SHA256 \((?P<name>.+)\) = (?P<digest>[0-9a-fA-F]{64})")
_BARE = re.compile(r"[0-9a-fA-F]{64}")
_ESCAPES = {r"\\": "\\", r"\n": "\n", r"\r": "\r"}


_Listed = dict[str, dict[str, str]]
"""By name of a file: the digests that are written for it, and in which file of checksums."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """What the bytes of a file should be.

    Attributes:
        algorithm: `SHA256` or `GIT`.
        digest: hex.
        origin: where that is written.
    """

    algorithm: str
    digest: str
    origin: str


def checksums_of(paths: Iterable[str]) -> dict[str, Checksum | None]:
    """Return what is known of each file; None if nothing is.

    The first of these counts: the name of its blob in the cache of the Hub; a file in its folder, named SHA256SUMS or
    *.sha256, that `sha256sum` wrote (also with --tag), or <name of the file>.sha256 with the digest alone; what
    huggingface_hub noted when it downloaded it to a local folder.

    Raises:
        CheckpointError: such a file cannot be read, or holds two digests for one that is asked for.
    """
    listed: dict[str, _Listed] = {}
    return {path: _from_cache(path) or _from_sidecars(path, listed) or _from_download(path) for path in paths}


def name_of_blob(path: str) -> str | None:
    """Return the digest by which the cache of the Hub names a file; None for a file elsewhere."""
    checksum = _from_cache(path)
    return None if checksum is None else checksum.digest


def _from_cache(path: str) -> Checksum | None:
    """Follow the links of a snapshot; a blob may itself be a link, into the store that all repositories share.

    Names in that store are no SHA-256, so they do not count.
    """
    for _ in range(MAX_LINKS):
        folder, name = os.path.split(path)
        folder = os.path.realpath(folder)
        above, last = os.path.split(folder)
        if last == "blobs" and os.path.basename(above).startswith("models--") and _DIGEST.fullmatch(name):
            return Checksum(_ALGORITHM_OF[len(name)], name, "the Hub, whose cache names the file by it")
        path = os.path.join(folder, name)
        if not os.path.islink(path):
            break
        path = os.path.join(folder, os.readlink(path))
    return None


def _from_download(path: str) -> Checksum | None:
    """Look for what a download to a local folder noted: in that folder, which may lie above the file's."""
    folder, name = os.path.split(os.path.abspath(path))
    while True:
        noted = os.path.join(folder, ".cache", "huggingface", "download", f"{name}.metadata")
        if os.path.isfile(noted):
            lines = _read(noted).splitlines()  # commit, ETag, time
            if len(lines) > 1 and _DIGEST.fullmatch(lines[1].strip()):
                digest = lines[1].strip()
                return Checksum(_ALGORITHM_OF[len(digest)], digest, f"the Hub, noted in {noted}")
            return None
        above, last = os.path.split(folder)
        if above == folder:
            return None
        folder, name = above, os.path.join(last, name)


def _from_sidecars(path: str, listed: dict[str, _Listed]) -> Checksum | None:
    """Look a file up in the files of checksums of its folder, which are read once and put into `listed`."""
    folder, file = os.path.split(os.path.abspath(path))
    if folder not in listed:
        listed[folder] = _listed(folder)
    found = listed[folder].get(file, {})
    if len(found) > 1:
        sidecars = ", ".join(sorted(set(found.values())))
        raise CheckpointError(f"{path}: {sidecars} beside it hold(s) {len(found)} different SHA-256 for it; remove one")
    return next((Checksum(SHA256, digest, os.path.join(folder, sidecar)) for digest, sidecar in found.items()), None)


def _listed(folder: str) -> _Listed:
    found: _Listed = {}
    for sidecar in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if sidecar == "SHA256SUMS" or sidecar.endswith(".sha256"):
            for name, digest in _lines(os.path.join(folder, sidecar)):
                found.setdefault(os.path.normpath(name), {}).setdefault(digest, sidecar)
    return found


def _lines(path: str) -> Iterator[tuple[str, str]]:
    """Yield names and digests; what is no checksum is passed over, as `sha256sum --check` does."""
    text = _read(path)
    if _BARE.fullmatch(text.strip()):
        yield os.path.basename(path).removesuffix(".sha256"), text.strip().lower()
        return
    for line in text.split("\n"):
        match = _LINE.fullmatch(line.removesuffix("\r")) or _TAGGED_LINE.fullmatch(line.removesuffix("\r"))
        if match is not None:
            name = match["name"]
            if match["escaped"]:
                name = re.sub(r"\\[\\nr]", lambda escape: _ESCAPES[escape[0]], name)
            yield name, match["digest"].lower()


def _read(path: str) -> str:
    source = LocalFile(path)
    try:
        if source.nbytes > MAX_NBYTES:
            raise CheckpointError(f"{path}: has {source.nbytes} bytes, expected at most {MAX_NBYTES} of checksums")
        return os.fsdecode(read_bytes(source, 0, source.nbytes))
    finally:
        source.close()
