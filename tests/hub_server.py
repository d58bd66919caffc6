"""A server on this machine that speaks as much of the Hub's protocol as loading and inspecting take, with ranges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.remote.hub_front import COMMIT, HubServer

__all__ = ["COMMIT", "Hub", "hub"]


@dataclass(frozen=True)
class Hub:
    """What was asked of the server."""

    url: str
    server: HubServer | None = None

    @property
    def sent(self) -> Counter[str]:
        """Bytes by file."""
        sent: Counter[str] = Counter()
        for path, count in self._stats["path_bytes"].items():
            sent[path.rpartition("/")[2]] += count
        return sent

    @property
    def requests(self) -> Counter[str]:
        """GET requests by file."""
        asked = (line.split(" ") for line in self._stats["asked"])
        return Counter(path.rpartition("/")[2] for method, path, *_ in asked if method == "GET")

    @property
    def _stats(self) -> dict[str, Any]:
        return self.server.stats() if self.server else {"path_bytes": {}, "asked": []}


@contextmanager
def hub(
    repositories: dict[str, Path], *, ignores_ranges: bool = False, shifts: int = 0, adds: int = 0
) -> Iterator[Hub]:
    """Serve folders under the ids that they are given by.

    Args:
        repositories: folders, by id.
        ignores_ranges: answer with whole files.
        shifts: bytes by which other ranges are sent than are asked for.
        adds: bytes that follow each range.
    """
    server = HubServer(repositories, None, ignores_ranges=ignores_ranges, shifts=shifts, adds=adds)
    try:
        yield Hub(server.url, server)
    finally:
        server.close()
