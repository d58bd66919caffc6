"""All checks, in order."""

from __future__ import annotations

from collections.abc import Iterator

from lowmem_load.doctor.devices import check_devices
from lowmem_load.doctor.finding import Finding
from lowmem_load.doctor.host import check_host
from lowmem_load.doctor.launcher import check_launcher
from lowmem_load.doctor.storage import check_storage
from lowmem_load.doctor.versions import check_versions, installed, of_environments


def check_all(folder: str | None) -> Iterator[Finding]:
    """Yield what all checks find.

    Args:
        folder: that checkpoints lie in.
    """
    yield from check_versions(installed(), of_environments())
    yield from check_host()
    yield from check_storage(folder)
    yield from check_launcher()
    yield from check_devices()
