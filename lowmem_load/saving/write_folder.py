"""All ranks write one folder together: plan, agree, write, agree, rename. Whatever the elements come from.

See [Note: the plan read backwards] in `writer.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from lowmem_load.distributed.nodes import node_name
from lowmem_load.distributed.peers import Progress
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import PlanError, UnsupportedError, listed
from lowmem_load.frameworks.peft import Merge
from lowmem_load.hf.saver import SavedFile
from lowmem_load.io.memory import trim_heap
from lowmem_load.io.mounts import has_caches_apart
from lowmem_load.phases import progress_bar
from lowmem_load.planning.regions import FlatRange
from lowmem_load.saving import folder as folders
from lowmem_load.saving.local_shards import LocalShard, MemoryPiece, is_dtensor
from lowmem_load.saving.writer import (
    FileLayout,
    SaveReport,
    Write,
    Writer,
    digest_of_files,
    lay_out_saved,
    own_writes,
    plan_writes,
    total_bytes,
)
from lowmem_load.text import share


class OwnElements(Protocol):
    """The elements of one tensor that this rank writes. All ranks together have each element once."""

    @property
    def mine(self) -> Sequence[FlatRange]:
        """Which elements of the tensor these are."""

    def memory(self) -> contextlib.AbstractContextManager[Iterable[MemoryPiece]]:
        """Yield memory that holds them. A piece may end when the next one is asked for."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What is written: files of weights, made of tensors.

    Attributes:
        files: of weights. Their expressions have `Source`s with the names of `elements`.
        elements: of each tensor what this rank writes, by name.
        merges: adapters, with what this rank holds of the parameters that they are merged into.
    """

    files: Sequence[SavedFile]
    elements: Mapping[str, OwnElements]
    merges: Sequence[tuple[Merge, Sequence[LocalShard]]] = ()


def write_folder(
    ranks: RankGroup, report: SaveReport, describe: Callable[[Path], Contents], arguments: Mapping[str, Any]
) -> None:
    """Write `report.folder`; see [Note: all at once] in `folder.py`. Collective, within a session.

    `describe` gets an empty folder of this rank's own, to which it writes all files that have no weights. `arguments`
    have to be equal on all ranks.
    """
    with tempfile.TemporaryDirectory(prefix="lowmem_load-") as made:
        scratch = Path(made)
        with ranks.step("planning the save", name=report.folder) as step, report.phase("plan"):
            target = folders.find_target(report.folder)
            contents = describe(scratch)
            files = [lay_out_saved(file, scratch) for file in contents.files]
            writes = plan_writes(files)
            mine = own_writes(writes, {name: own.mine for name, own in contents.elements.items()})
            own_bytes, all_bytes = total_bytes(itertools.chain.from_iterable(mine.values())), total_bytes(writes)
            step.digest = {key: repr(value) for key, value in arguments.items()}
            step.digest["files"] = listed([f"{file.name} ({file.nbytes} bytes)" for file in files])
            step.digest["headers of the files"] = digest_of_files(files)
            step.payload = own_bytes, target, node_name(ranks.rank)
        nbytes, targets, nodes = zip(*step.payloads, strict=True)
        if sum(nbytes) != all_bytes:  # see [Note: the plan read backwards]
            raise PlanError(
                f"{report.folder}: the ranks hold {sum(nbytes)} bytes of {all_bytes} that are to be written "
                f"(by rank: {', '.join(map(str, nbytes))}); were all ranks of the model called?"
            )
        report.files = {file.name: file.nbytes for file in files}
        with _shared_staging(ranks, report, files, targets) as staging:
            paths = [staging.path / file.name for file in files]
            past_cache = len(set(nodes)) > 1 and has_caches_apart(target)
            _write(ranks, report, contents, _in_turn(mine, len(files), ranks), own_bytes, paths, past_cache=past_cache)
            with ranks.step("renaming", name=report.folder), report.phase("rename"):
                if ranks.rank == 0:
                    folders.put_beside(staging, scratch)
                    folders.commit(staging)


@contextlib.contextmanager
def _shared_staging(
    ranks: RankGroup, report: SaveReport, files: Sequence[FileLayout], targets: Sequence[str]
) -> Iterator[folders.Staging]:
    """Have rank 0 make the staging folder for the block; it is removed if the block fails on any rank. Collective.

    `targets` are the folder as each rank knows it.
    """
    made: folders.Staging | None = None
    try:
        with ranks.step("making the folder", name=report.folder) as step:
            if ranks.rank == 0:
                made = folders.make_staging(targets[0], files)
                step.payload = str(made.path), made.token, made.is_inside
        path, token, is_inside = step.payloads[0]
        staging = folders.Staging(Path(targets[ranks.rank]), token, is_inside)
        with ranks.step("reaching the folder", name=report.folder):
            folders.check_seen(staging, path)
        yield staging
    except BaseException:  # on any rank: by now all have stopped writing
        if made is not None:
            folders.discard(made)
        raise


def _write(
    ranks: RankGroup,
    report: SaveReport,
    contents: Contents,
    todo: dict[str, list[Write]],
    own_bytes: int,
    paths: Sequence[Path],
    *,
    past_cache: bool,
) -> None:
    """Write what is this rank's to write, given the writes of each tensor. Collective."""

    def progress() -> Progress:
        written = f"{share(writer.written_bytes, own_bytes)} written"
        return Progress(writer.written_bytes + writer.num_synced, f"{written}, {writer.num_synced} files synced")

    def on_bytes(num_bytes: int) -> None:
        update(num_bytes)
        ranks.check()

    bar = progress_bar(own_bytes, "Saving", ranks.rank)
    with bar as update, Writer(paths, on_bytes, past_cache=past_cache) as writer:
        for merge, shards in contents.merges:
            _write_merged(ranks, report, merge, shards, writer, todo)
        with ranks.step("writing", name=report.folder, progress=progress):
            with report.phase("write"):
                for name, writes in todo.items():
                    with contents.elements[name].memory() as pieces:
                        for memory, first in pieces:
                            writer.write_parts(writes, memory, first)
                            report.sample_memory()
                if writer.written_bytes != own_bytes:
                    raise PlanError(f"{report.folder}: wrote {writer.written_bytes} bytes, expected {own_bytes}")
            with report.phase("sync"):
                writer.sync()
        report.written_bytes, report.staged_bytes = writer.written_bytes, writer.staged_bytes


def _write_merged(
    ranks: RankGroup,
    report: SaveReport,
    merge: Merge,
    shards: Sequence[LocalShard],
    writer: Writer,
    todo: dict[str, list[Write]],
) -> None:
    """Write the parameters that adapters are merged into, and remove them from `todo`."""
    name = shards[0].source.name
    with ranks.step(f"merging {name}", name=report.folder) as step, report.phase("merge"):
        merged, digest = gathered_and_merged(merge, shards)
        step.digest = {"adapters with values": digest}  # else ranks would write a mixture of models
        for shard, memory in zip(shards, merged, strict=False):
            for write in todo.pop(shard.source.name, ()):
                writer.write(write, memory, 0)
            report.sample_memory()
    report.num_merged += len(merge.layers)


def _in_turn(writes: Mapping[str, list[Write]], num_files: int, ranks: RankGroup) -> dict[str, list[Write]]:
    """Return the writes by tensor. Each rank begins with another file: file systems let one rank write at a time."""
    own = ranks.rank * num_files // ranks.world_size
    later = {name: mine for name, mine in writes.items() if mine[0].file < own}
    return {name: mine for name, mine in writes.items() if name not in later} | later


def gathered_and_merged(merge: Merge, shards: Sequence[LocalShard]) -> tuple[list[torch.Tensor], str]:
    """Return the merged parameters, flat, on ranks that write any of them, and a digest of the adapters. Collective."""
    adapters = merge.adapters()
    if any(map(is_dtensor, (*merge.parameters, *adapters))):
        raise UnsupportedError(
            f"{shards[0].source.name}: is a DTensor, whose adapters cannot be merged while it is saved; save the "
            "adapter, and merge it into an ordinary load"
        )
    trim_heap()  # of the layer before
    digest = hashlib.sha256()
    with _gathered([*merge.parameters, *adapters]):
        for adapter in adapters:
            digest.update(adapter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        merged = merge.run() if any(shard.mine for shard in shards) else []
    return [tensor.reshape(-1) for tensor in merged], digest.hexdigest()[:16]


def _gathered(parameters: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    if "deepspeed" not in sys.modules:
        return contextlib.nullcontext()
    from lowmem_load.ds.parameters import gathered

    return gathered(parameters)
