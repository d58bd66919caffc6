"""Finds the expected checksum of a file: in the cache of the Hub, or in files beside it. Reads small files only.

A file on the Hub has an ETag: the SHA-256 of its bytes if it is stored by LFS or Xet, as weights are; else the SHA-1 by
which git names it. The cache names its files by the ETag, and a download to a local folder notes it.
Source: huggingface_hub 2.4.0 `file_download.py`, `_local_folder.py`, `utils/_shared_blobs.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lowmem_load.errors import CheckpointError
from lowmem_load.io.source import read_small
from lowmem_load.io.stand_ins import local_place, remote_object

GIT, SHA256 = "git's sha1", "sha256"
"""Algorithms. Git's is a SHA-1 of the size and the bytes."""

MAX_NBYTES = 16 << 20
"""Most bytes of a checksum file: some 100,000 lines."""

MAX_LINKS = 40
"""Most symbolic links that are followed, as on Linux."""

_ALGORITHM_OF = {64: SHA256, 40: GIT}
_DIGEST = re.compile(r"(?:[0-9a-f]{64}|[0-9a-f]{40})")
_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>.+)")
_TAGGED_LINE = re.compile(r"SHA256 \((?P<name>.+)\) = (?P<digest>[0-9a-fA-F]{64})")
_BARE = re.compile(r"[0-9a-fA-F]{64}")

_Listed = dict[str, dict[str, str]]
"""For each file name, the digests written for it, each with its checksum file."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """The expected digest (hexadecimal) of a file, and where it was found, for messages."""

    algorithm: str
    digest: str
    origin: str


def checksums_of(paths: Iterable[str]) -> dict[str, Checksum | None]:
    """Return the expected checksum of each file; None if there is none.

    The first one found counts:
    - what the Hub says of a file there, or the name of the file in the cache of the Hub;
    - a line of SHA256SUMS or *.sha256 in its folder, as `sha256sum` writes it (also with --tag), or <file>.sha256 with
      nothing but the digest;
    - what huggingface_hub noted when it downloaded the file to a local folder.

    Raises CheckpointError if a checksum file cannot be read, or there are two different digests for one file.
    """
    listed: dict[str, _Listed] = {}

    def checksum_of(path: str) -> Checksum | None:
        item, place = remote_object(path), local_place(path)
        if item is None:
            return _from_cache(path) or _from_sidecars(path, listed) or _from_download(path)
        of_hub = Checksum(SHA256, item.sha256, "the Hub") if item.sha256 else None
        return of_hub or _from_sidecars(place, listed)

    return {path: checksum_of(path) for path in paths}


def name_of_blob(path: str) -> str | None:
    """Return the digest by which the cache of the Hub names a file; None for other files."""
    checksum = _from_cache(path)
    return None if checksum is None else checksum.digest


def _from_cache(path: str) -> Checksum | None:
    # A blob may be a link into a store of all repositories, whose names are no SHA-256 and do not count.
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
    folder, file = os.path.split(os.path.abspath(path))
    if folder not in listed:
        listed[folder] = _read_sidecars(folder)
    digests = listed[folder].get(file, {})
    if len(digests) > 1:
        sidecars = ", ".join(sorted(set(digests.values())))
        raise CheckpointError(
            f"{path}: {sidecars} hold(s) {len(digests)} different SHA-256 for it; remove the wrong one"
        )
    return next((Checksum(SHA256, digest, os.path.join(folder, sidecar)) for digest, sidecar in digests.items()), None)


def _read_sidecars(folder: str) -> _Listed:
    digests_by_file: _Listed = {}
    for sidecar in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        if sidecar == "SHA256SUMS" or sidecar.endswith(".sha256"):
            for name, digest in _lines(os.path.join(folder, sidecar)):
                digests_by_file.setdefault(os.path.normpath(name), {}).setdefault(digest, sidecar)
    return digests_by_file


def _lines(path: str) -> Iterator[tuple[str, str]]:
    # Other lines are skipped, as by `sha256sum --check`.
    text = _read(path)
    if _BARE.fullmatch(text.strip()):
        yield os.path.basename(path).removesuffix(".sha256"), text.strip().lower()
        return
    for line in text.split("\n"):
        match = _LINE.fullmatch(line.removesuffix("\r")) or _TAGGED_LINE.fullmatch(line.removesuffix("\r"))
        if match is not None:
            yield match["name"], match["digest"].lower()


def _read(path: str) -> str:
    return os.fsdecode(read_small(path, MAX_NBYTES))
