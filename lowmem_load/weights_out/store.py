"""Saves into object stores: files are dealt to ranks, to which their bytes come bucket by bucket.

[Note: all at once in a store] Nothing is there under the name of a file of weights until all files have been uploaded
and all ranks have agreed. Then the former weights go away, and first what loaders look for. The files without weights
follow, each rank completes its files, with one request for each, and the index comes last. So nobody finds new weights
next to a former file, such as a configuration; but the folder does not load until the index, or the single file, is
there.

[Note: two saves to one place] Each save begins by writing its token into a file of one name. If the token is not there
when all is uploaded, the save raises. So the later one of two saves wins, also over one that was killed, unless it
begins while the other one replaces files.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from lowmem_load.distributed.steps import RankGroup
from lowmem_load.errors import CheckpointError, PlanError
from lowmem_load.files.remote_file import map_in_threads
from lowmem_load.files.store_folder import StoreFolder, Upload
from lowmem_load.phases import Phases, no_callback
from lowmem_load.weights_out.buckets import PlannedTensor, Unit
from lowmem_load.weights_out.folder import of_same_weights, opens
from lowmem_load.weights_out.weight_files import FileLayout, cut
from lowmem_load.weights_out.weights import Deliver

BUCKET_BYTES = 64 << 20
"""Most bytes of a file that are put together at a time."""

MARKER = ".lowmem_load-saving"
"""File in the folder while a save to it has not ended."""

CLEAN_UP_S = 30.0
"""Seconds for which a save that has failed waits for the store to forget its files."""


def write_to_store(
    ranks: RankGroup,
    report: Phases,
    files: Sequence[FileLayout],
    deliver: Deliver,
    scratch: Path,
    url: str,
    on_bytes: Callable[[int], object],
) -> None:
    """Upload files of weights, each by one rank, and the files in `scratch` by rank 0. Collective."""
    folder, token, is_first = StoreFolder(url), secrets.token_hex(8).encode(), ranks.rank == 0
    names = [Path(file.name) for file in files]
    others = sorted(path.relative_to(scratch) for path in scratch.rglob("*") if path.is_file())
    folders, uploads = {name.parent.as_posix() for name in names}, list[Upload]()

    def put(*, is_opened: bool) -> None:
        for name in others:
            if opens(name) == is_opened:
                folder.put(str(name), (scratch / name).read_bytes())

    def release() -> None:
        with contextlib.suppress(CheckpointError):
            if folder.get(MARKER) == token:
                folder.delete([MARKER])

    try:
        with ranks.step("reaching the store", name=url):
            if is_first:
                folder.put(MARKER, token)
                folder.names(folders)  # if that is not allowed, it fails now
        with report.phase("write"):
            _upload(ranks, files, deliver, folder, uploads, on_bytes)
        with report.phase("rename"):
            with ranks.step("replacing the former files", name=url):
                if is_first:
                    if folder.get(MARKER) != token:
                        raise CheckpointError(
                            f"{url}: a second save to this folder has begun; give each a folder of its own"
                        )
                    former = of_same_weights([*names, *others], map(Path, folder.names(folders)))
                    for is_opened in (True, False):
                        folder.delete([str(file) for file in former if opens(file) == is_opened])
                    put(is_opened=False)
            with ranks.step("completing the uploads", name=url):
                map_in_threads(Upload.complete, uploads, no_callback)
            with ranks.step("writing the index", name=url):
                if is_first:
                    put(is_opened=True)
                    release()
    except BaseException:
        _clean_up([upload.abort for upload in uploads] + [release] * is_first)
        raise


def _upload(
    ranks: RankGroup,
    files: Sequence[FileLayout],
    deliver: Deliver,
    folder: StoreFolder,
    uploads: list[Upload],
    on_bytes: Callable[[int], object],
) -> None:
    """Upload this rank's files, and enter them in `uploads`. Collective."""
    # Few files go to ranks that are far apart, so to several nodes.
    owners = [number * ranks.world_size // len(files) for number in range(len(files))]
    own = [number for number, owner in enumerate(owners) if owner == ranks.rank]

    def begin(number: int) -> Upload:
        file = files[number]
        uploads.append(Upload(folder, file.name, file.nbytes, ranks.check))
        uploads[-1].write(torch.frombuffer(bytearray(file.header), dtype=torch.uint8))
        return uploads[-1]

    # Each rank uploads a bucket while the others are sent theirs.
    pieces: dict[int, list[tuple[int, PlannedTensor]]] = {owner: [] for owner in owners}
    for number, owner in enumerate(owners):
        pieces[owner] += [(number, piece) for piece in cut(files[number], BUCKET_BYTES)]
    turns = [each for turn in itertools.zip_longest(*pieces.values()) for each in turn if each is not None]
    units, to = [Unit((piece,)) for _, piece in turns], [owners[number] for number, _ in turns]
    begun = dict[int, Upload]()
    with deliver(units, to) as buckets:
        for (number, _), bucket in zip(turns, buckets, strict=True):
            while bucket:
                data = bucket.pop()[1].view(torch.uint8).cpu()
                begun[number] = begun.get(number) or begin(number)
                begun[number].write(data)
                on_bytes(data.numel())
                del data  # before the next bucket is put together
    with ranks.step("uploading", name=folder.url):
        for number in own:
            upload = begun.get(number) or begin(number)
            if upload.num_missing:
                raise PlanError(f"{files[number].name}: {upload.num_missing} bytes were not uploaded")


def _clean_up(acts: Sequence[Callable[[], None]]) -> None:
    """Clean up a save that has failed, for a while: the store may not answer any more."""
    until_s = time.monotonic() + CLEAN_UP_S

    def check() -> None:
        if time.monotonic() > until_s:
            raise TimeoutError

    with contextlib.suppress(TimeoutError):
        map_in_threads(lambda act: act(), acts, check)
