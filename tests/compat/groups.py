"""The groups of tests that run in each environment, and what came of them, counted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.compat.environments import Environment
from tests.compat.install import folder_of, python_of, variables
from tests.ranks import REPO

SEAMS = ("active", "contract", "ds_config_precision", "ds_engine", "ds_hooks", "initialise", "loader")
SEAMS += ("loader_handlers", "parameters", "partition", "replaced", "tensor")

GROUPS: dict[str, tuple[str, ...]] = {
    "seams": ("tests/contracts/", *(f"tests/unit/test_{name}.py" for name in SEAMS)),
    "parity": ("tests/multi_rank/test_parity.py",),
    "streaming": ("tests/multi_rank/test_streaming.py",),
    "training": ("tests/multi_rank/test_after_load.py", "tests/multi_rank/test_several_models.py"),
    "modes": ("tests/multi_rank/test_modes.py",),
    "saving": ("tests/multi_rank/test_save.py", "tests/unit/test_saving_merged.py"),
    "sharded": (
        *("tests/multi_rank/test_load_into.py", "tests/multi_rank/test_save_sharded.py", "tests/unit/test_shards.py"),
        *("tests/multi_rank/test_distributed_config.py", "tests/multi_rank/test_accelerate_fsdp2.py"),
    ),
    "partial": ("tests/multi_rank/test_partial_training.py", "tests/multi_rank/test_partial_precision.py"),
    "pipelines": ("tests/pipelines/",),
}
TIMEOUT_S = 3600.0
"""For all groups of an environment: six times what they take on two idle cores."""


def groups_of(environment: Environment) -> list[str]:
    """Returns the groups that can run in an environment."""
    return [name for name in GROUPS if name != "pipelines" or environment.has_pipelines]


def run_groups(environment: Environment, groups: Sequence[str], timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Runs some groups in one process, which shares the start of its ranks; returns what came of each, by group.

    What had not begun when the time was over is missing; the group that was under way then has a failure that says so.
    """
    folder = folder_of(environment)
    record, log = folder / "record.jsonl", folder / f"{'-'.join(groups)}.log"
    record.write_text("")
    command = [str(python_of(environment)), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.compat.record"]
    # torch warns of what older releases of the others do
    command += ["-o", "filterwarnings=default", "--continue-on-collection-errors"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(path for group in groups for path in GROUPS[group])],
            stdout=output,
            stderr=output,
            cwd=REPO,
            env={**variables(environment), "COMPAT_RECORD": str(record)},
            start_new_session=True,
        )
        stopped = ""
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            stopped = f"not finished after {timeout_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not stopped and process.returncode not in (0, 1):  # 1: tests failed
        stopped = f"pytest ended with status {process.returncode}"
    found = counted(json.loads(line) for line in record.read_text().splitlines())
    if stopped:
        last = found.setdefault(list(found or groups)[-1 if found else 0], _nothing())
        last["failed"] += 1
        last["failures"][log.name] = stopped
    return found


def _nothing() -> dict[str, Any]:
    return {"passed": 0, "failed": 0, "skipped": 0, "failures": {}, "skips": {}}


def _is_of(file: str, paths: tuple[str, ...]) -> bool:
    """Return whether a file, or a folder that could not be collected, is of a group."""
    return file.startswith(paths) or any(path.startswith(file) for path in paths)


def counted(entries: Iterable[Mapping[str, str]]) -> dict[str, Any]:
    """Returns by group how many tests passed, failed and were skipped, and why.

    Args:
        entries: as record.py writes them.
    """
    found: dict[str, Any] = {}
    for entry in entries:
        group = next(name for name, paths in GROUPS.items() if _is_of(entry["file"], paths))
        of_group = found.setdefault(group, _nothing())
        of_group[entry["outcome"]] += 1
        name = f"{entry['file'].rpartition('/')[2].removesuffix('.py')}::{entry['name']}"
        if entry["outcome"] != "passed":
            of_group["failures" if entry["outcome"] == "failed" else "skips"][name] = entry["why"]
    return found
