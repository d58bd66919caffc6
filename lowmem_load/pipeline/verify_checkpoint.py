"""Compares files with their checksums: `verify_checkpoint` in a plain process, `agree_on_checksums` on all ranks."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass

from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.heartbeat import Progress
from lowmem_load.errors import CheckpointError, listed
from lowmem_load.formats.index import files_below
from lowmem_load.hf.hub_files import cached_folder
from lowmem_load.hf.model_folder import WEIGHTS_ENDS, check_name, is_training_state
from lowmem_load.hf.remote_names import find_folder
from lowmem_load.io.checksums import SHA256, Checksum, checksums_of
from lowmem_load.io.source import ByteSource, OpenSources
from lowmem_load.io.stand_ins import open_file, origins_named
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.text import share

MAX_THREADS = 4
"""Files that `verify_checkpoint` hashes at a time, cores permitting. More compete for one disk."""

CHUNK_BYTES = 1 << 20
"""Read at a time, so that it is still in the cache of the core when it is hashed."""

FILES_SHOWN = 10
"""Files that an error names."""


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What was found of one file.

    Attributes:
        path: of the file.
        nbytes: its size.
        algorithm: "sha256", or "git's sha1" for small files of the Hub.
        expected: the hex digest that it should have; None if there is none.
        digest: the hex digest that it has.
        origin: where `expected` is written.
    """

    path: str
    nbytes: int
    algorithm: str
    expected: str | None
    digest: str
    origin: str | None

    @property
    def is_proven(self) -> bool:
        """Whether there was a checksum, and it is equal."""
        return self.expected == self.digest

    @property
    def problem(self) -> str | None:
        """What is wrong; None if nothing is, or there is no checksum."""
        if self.expected is not None and not self.is_proven:
            return f"{self.path}: its {self.algorithm} is {self.digest}, expected {self.expected} (from {self.origin})"
        return None


@origins_named()
def verify_checkpoint(
    name: str | os.PathLike[str],
    *,
    subfolder: str = "",
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    stream: bool = False,
) -> tuple[FileCheck, ...]:
    """Compare the files of a checkpoint with their checksums. Files on this machine are read, and nothing is fetched.

    Files at a URL are fetched to be hashed, and none is kept; with `stream` also those of a model on the Hub, unless
    the cache holds it. Checksums are the SHA-256 of weights, and git's SHA-1 of small files, that the Hub gives or gave
    at the download (to its cache or a local folder), and what `sha256sum` wrote to SHA256SUMS or `*.sha256` in the
    folder. Files of weights without a checksum are hashed and returned, too, with `expected` None: see `is_proven`.

    Local: a plain process, without ranks.
    Memory: 1 MiB for each of at most 4 threads.

    Args:
        name: a local folder, a Hub id that is in the cache, or a URL.
        subfolder: of it, whose files are meant. In folders below, those that an index names.
        revision: of a Hub id; None for its main branch.
        cache_dir: of the Hub; None for the usual one.
        stream: see above.

    Returns:
        Every file of weights, and every other file with a checksum, by name.

    Raises:
        CheckpointError: names the files that differ; or there are no weights, or a file cannot be read.
    """
    keywords = {"subfolder": subfolder, "revision": revision, "cache_dir": cache_dir}
    place, _ = find_folder(os.fspath(name), keywords, stream=stream)
    folder = os.path.join(place, subfolder)
    if not os.path.isdir(place):
        check_name(place, subfolder)
        folder = cached_folder(place, subfolder, revision, cache_dir)
    if not os.path.isdir(folder):
        raise CheckpointError(f"{folder}: no such folder")
    paths = [os.path.join(folder, file) for file in (*sorted(os.listdir(folder)), *files_below(folder))]
    known = checksums_of(path for path in paths if os.path.isfile(path))
    chosen = {path: checksum for path, checksum in known.items() if checksum is not None or _is_weights(path)}
    if not any(map(_is_weights, chosen)):
        raise CheckpointError(f"{folder}: holds no weights ({', '.join(WEIGHTS_ENDS)})")
    checks = check_files(
        chosen.items(), lambda path: closing(open_file(path)), num_threads=min(MAX_THREADS, os.cpu_count() or 1)
    )
    refuse([check.problem for check in checks])
    return tuple(checks)


def check_files(
    files: Iterable[tuple[str, Checksum | None]],
    reading: Callable[[str], AbstractContextManager[ByteSource]],
    *,
    num_threads: int,
    on_bytes: Callable[[int], object] = int,
) -> list[FileCheck]:
    """Return the checks of files, in their order. Threads call `on_bytes` with the number of bytes they hashed."""

    def check(file: tuple[str, Checksum | None]) -> FileCheck:
        path, known = file
        algorithm = SHA256 if known is None else known.algorithm
        digest, origin = (None, None) if known is None else (known.digest, known.origin)
        with reading(path) as source:
            actual = hash_source(source, algorithm, on_bytes)
            return FileCheck(source.path, source.nbytes, algorithm, digest, actual, origin)

    with ThreadPoolExecutor(num_threads, "lowmem_load-hash") as pool:
        return list(pool.map(check, files))


def hash_source(source: ByteSource, algorithm: str, on_bytes: Callable[[int], object] = int) -> str:
    """Return the hex digest of all bytes of a source; raise CheckpointError if it changed meanwhile. Memory: 1 MiB."""
    before = source.version
    hasher = (
        hashlib.sha256() if algorithm == SHA256 else hashlib.sha1(b"blob %d\0" % source.nbytes, usedforsecurity=False)
    )
    chunk = memoryview(bytearray(min(CHUNK_BYTES, source.nbytes)))
    for offset in range(0, source.nbytes, CHUNK_BYTES):
        part = chunk[: source.nbytes - offset]
        source.read_into(offset, part)
        hasher.update(part)
        on_bytes(part.nbytes)
    if source.version != before:
        raise CheckpointError(f"{source.path}: was replaced or written to while it was hashed; try again")
    return hasher.hexdigest()


def refuse(problems: Sequence[str | None]) -> None:
    """Raise CheckpointError if there is any problem."""
    present = [problem for problem in problems if problem is not None]
    if present:
        shown = "\n".join(present[:FILES_SHOWN]) + ("\n..." if len(present) > FILES_SHOWN else "")
        raise CheckpointError(
            f"{len(present)} file(s) are not what they should be; download or copy them again, or correct the checksum "
            f"if the file was changed on purpose:\n{shown}"
        )


def _is_weights(path: str) -> bool:
    name = os.path.basename(path)
    return name.endswith(WEIGHTS_ENDS) and not is_training_state(name)


def agree_on_checksums(
    ranks: RankGroup,
    name: str,
    files: Sequence[PlannedFile],
    views: Sequence[str],
    sources: OpenSources,
    *,
    num_threads: int,
) -> None:
    """Raise on all ranks unless every file has the checksum from the Hub or beside it. Collective: two steps.

    Ranks of one machine that opened the very same files (equal `views`, see `agree_on_bytes`) share the hashing.
    """
    with ranks.step("looking for checksums", name=name):
        known = _known_checksums(files)
    together = [rank for rank, view in enumerate(views) if view == views[ranks.rank]]
    # SHA-256 is serial, so a file is not divided. The largest are dealt first.
    ordered = sorted(files, key=lambda file: (-file.nbytes, file.path))
    mine = ordered[together.index(ranks.rank) :: len(together)]
    hashed, total_bytes = [0], sum(file.nbytes for file in mine)

    def on_bytes(num_bytes: int) -> None:
        hashed[0] += num_bytes
        ranks.check()

    def progress() -> Progress:
        return Progress(hashed[0], f"{share(hashed[0], total_bytes)} hashed")

    with ranks.step("verifying files", name=name, progress=progress) as step:
        sources.expect(mine)
        expected = [(file.path, known[file.path]) for file in mine]
        checks = check_files(expected, sources.reading, num_threads=num_threads, on_bytes=on_bytes)
        step.payload = [check.problem for check in checks if check.problem is not None]
    refuse([f"rank {rank}: {problem}" for rank, problems in enumerate(step.payloads) for problem in problems])


def check_planned(files: Sequence[PlannedFile], sources: OpenSources, *, num_threads: int) -> None:
    """Do what `agree_on_checksums` does, for a load without other ranks. Local."""
    known = _known_checksums(files)
    sources.expect(files)
    refuse([check.problem for check in check_files(known.items(), sources.reading, num_threads=num_threads)])


def _known_checksums(files: Sequence[PlannedFile]) -> Mapping[str, Checksum | None]:
    """Return the checksums of all files; raise CheckpointError if one is missing."""
    known = checksums_of(file.path for file in files)
    if unknown := sorted(path for path, checksum in known.items() if checksum is None):
        raise CheckpointError(
            f"verify=True, but nothing is known of {listed(unknown, FILES_SHOWN)}: neither the Hub's "
            "cache nor a SHA256SUMS beside it has a checksum. Where the files are known to be good, run sha256sum "
            "*.safetensors > SHA256SUMS in the folder; or load without verify"
        )
    return known
