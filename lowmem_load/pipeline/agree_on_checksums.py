"""Between planning and reading: the files are hashed, each once on each machine, and compared with what is known."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from lowmem_load.distributed.group import RankGroup
from lowmem_load.distributed.heartbeat import Progress
from lowmem_load.errors import CheckpointError
from lowmem_load.io.checksums import checksums_of
from lowmem_load.io.open_sources import OpenSources
from lowmem_load.pipeline.verify_checkpoint import FILES_SHOWN, check_files, refuse
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.quantities import share


def agree_on_checksums(
    ranks: RankGroup,
    name: str,
    files: Sequence[PlannedFile],
    views: Sequence[str],
    sources: OpenSources,
    *,
    num_threads: int,
) -> None:
    """Raise on all ranks unless every file has the bytes that the Hub, or a file of checksums beside it, says.

    Ranks of one machine that opened the very same files share the hashing; others hash what they will read.

    Collective: two steps.

    Args:
        ranks: that load together.
        name: what is loaded.
        files: that were planned against. They are refused if they changed since.
        views: what `agree_on_bytes` returned.
        sources: which their headers were read from.
        num_threads: files hashed at a time.

    Raises:
        CheckpointError: names the files that differ, or of which nothing is known.
        RankError: some ranks cannot read a file, or only on some nothing is known of it.
    """
    with ranks.step("looking for checksums", name=name):
        known = checksums_of(file.path for file in files)
        unknown = sorted(path for path, checksum in known.items() if checksum is None)
        if unknown:
            more = f" and {len(unknown) - FILES_SHOWN} more" if len(unknown) > FILES_SHOWN else ""
            raise CheckpointError(
                f"verify=True, but nothing is known of {', '.join(unknown[:FILES_SHOWN])}{more}: neither the Hub's "
                "cache nor a SHA256SUMS beside it has a checksum. Where the files are known to be good, run sha256sum "
                "*.safetensors > SHA256SUMS in the folder; or load without verify"
            )
    together = [rank for rank, view in enumerate(views) if view == views[ranks.rank]]
    mine = shares(files, len(together))[together.index(ranks.rank)]
    hashed = [0]
    total_bytes = sum(file.nbytes for file in mine)

    def on_bytes(num_bytes: int) -> None:
        hashed[0] += num_bytes
        ranks.check()

    def progress() -> Progress:
        return Progress(hashed[0], f"{share(hashed[0], total_bytes)} hashed")

    with ranks.step("verifying files", name=name, progress=progress) as step:
        sources.expect(mine)
        asked = [(file.path, known[file.path]) for file in mine]
        checks = check_files(asked, sources.reading, num_threads=num_threads, on_bytes=on_bytes)
        step.payload = [check.problem for check in checks if check.problem is not None]
    refuse([f"rank {rank}: {problem}" for rank, found in enumerate(step.payloads) for problem in found])


def shares(files: Sequence[PlannedFile], num_ranks: int) -> list[list[PlannedFile]]:
    """Return the files that each rank hashes, balanced by bytes; a file is not divided, since SHA-256 is serial."""
    found: list[list[PlannedFile]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for file in sorted(files, key=lambda file: (-file.nbytes, file.path)):
        nbytes, rank = heapq.heappop(loads)
        found[rank].append(file)
        heapq.heappush(loads, (nbytes + file.nbytes, rank))
    return found
