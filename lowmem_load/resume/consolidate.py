"""consolidate: a checkpoint of ZeRO becomes a Hugging Face folder, by byte ranges and without a process group."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from lowmem_load.errors import CheckpointError, ConfigError, PlanError
from lowmem_load.hf import saver
from lowmem_load.hf.load_lock import load_lock
from lowmem_load.hf.of_config import describe_plain, model_of
from lowmem_load.io.executor import Executor
from lowmem_load.phases import progress_bar
from lowmem_load.planning.expression import Source
from lowmem_load.resume.copying import chunks_of, copy_in_processes
from lowmem_load.resume.open_checkpoint import open_checkpoint
from lowmem_load.resume.zero_checkpoint import Checkpoint, find_folder
from lowmem_load.resume.zero_layout import FP32, Chain, Pieces, SavedParameter
from lowmem_load.saving import folder as folders
from lowmem_load.saving.file_layout import FileLayout, lay_out
from lowmem_load.saving.save_plan import Write, plan_writes, total_bytes
from lowmem_load.saving.save_report import SaveReport

BESIDE = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*processor_config.json", "chat_template*")
"""Files beside a configuration that go into the folder as they are: what Trainer writes for the tokenizer."""


def consolidate(
    checkpoint_folder: str | os.PathLike[str],
    output_folder: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    processes: int = 1,
    config: str | os.PathLike[str] | Literal[False] | None = None,
    progress: bool | None = None,
) -> SaveReport:
    """Make a Hugging Face folder of a checkpoint that DeepSpeed's `save_checkpoint` has written under ZeRO.

    Takes what `load_checkpoint` takes: stages 1, 2 and 3, also with the optimizer on nvme, and universal checkpoints.
    Needs no process group, no GPU and no DeepSpeed. The weights are the optimizer's fp32 ones, those of frozen
    parameters what was saved of them. The folder appears all at once when it is complete; see `save_model`.

    Args:
        checkpoint_folder: that `save_checkpoint` was given, or a `PartialEngine`'s; it has the folders of the tags.
        output_folder: made if it is not there.
        tag: of the checkpoint; None for the one that the file `latest` names (or `latest_universal`).
        dtype: of floating-point tensors in the files: fp64, fp32, fp16 or bf16. None: fp32.
        max_shard_size: bytes, or text such as "5GB".
        processes: that copy at the same time. More than one are started by `spawn`, so a script that calls this must
            do so under `if __name__ == "__main__":`.
        config: folder with config.json, or name of a model on the Hub: the parameters are named as `save_pretrained`
            of that model would. None: `checkpoint_folder`, if it has one, as Trainer writes it. False, or where there
            is none: they have the names of the checkpoint, and tied ones are written under each name.
        progress: True shows a progress bar, False none, None one on long runs when stderr is a terminal.

    Returns:
        What was written.

    Memory: 40 MiB in each process.

    Raises:
        CheckpointError: the checkpoint is incomplete, malformed or truncated, or of another model than `config`.
        ConfigError: the folder cannot be used, or an argument.
        UnsupportedError: model parallelism, or what cannot be written piece by piece.
    """
    if type(processes) is not int or processes < 1:
        raise ConfigError(f"consolidate: processes={processes!r}, expected a number from 1 on")
    if dtype is not None and dtype not in saver.DTYPES:
        raise ConfigError(f"consolidate: dtype {dtype!r}; name one of {saver.DTYPES}, or none")
    report = SaveReport(os.fspath(output_folder))
    if config is None and os.path.isfile(os.path.join(checkpoint_folder, "config.json")):
        config = checkpoint_folder
    with tempfile.TemporaryDirectory(prefix="lowmem_load-") as name, Executor() as executor:
        with report.phase("plan"), saver.logged_as(Path(name), report.folder):
            found = find_folder(checkpoint_folder, tag, ("latest", "latest_universal"))
            if found is None:
                raise CheckpointError(f"{checkpoint_folder}: no file 'latest' in it; name the tag")
            checkpoint = open_checkpoint(found, executor)
            tensors = tensors_of(checkpoint)
            saved = _describe(checkpoint, tensors, Path(name), config, dtype or torch.float32, max_shard_size)
            copying = _plan(tensors, saved)
        _write(copying, checkpoint, Path(name), report, processes, progress)
    return report


def tensors_of(checkpoint: Checkpoint) -> dict[str, SavedParameter]:
    """Return each tensor of the model, by each of its names."""
    found = {**checkpoint.whole, **checkpoint.of_module}
    return found | {name: found[other] for name, other in checkpoint.shared.items() if other in found}


@dataclass(frozen=True, slots=True)
class _Copying:
    """What is written, and where it comes from."""

    files: Sequence[FileLayout]
    writes: Sequence[Write]
    pieces: Mapping[str, Pieces | Chain]


def _describe(
    checkpoint: Checkpoint,
    tensors: Mapping[str, SavedParameter],
    scratch: Path,
    config: str | os.PathLike[str] | Literal[False] | None,
    dtype: torch.dtype,
    max_shard_size: int | str,
) -> list[saver.SavedFile]:
    """Return the files of weights; write all others to `scratch`."""
    sources = {name: Source("", name, 0, each.shape, each.dtype) for name, each in tensors.items()}
    if config is None or config is False:
        return describe_plain(sources, scratch, dtype=dtype, max_shard_size=max_shard_size)
    with load_lock():
        model = model_of(config)
        held = _matched(model, sources, config)
        _check_ties(model, checkpoint, config)
        saved = saver.describe_save(model, scratch, held, dtype=dtype, max_shard_size=max_shard_size, kwargs={})
    for pattern in BESIDE if os.path.isdir(config) else ():
        for path in Path(config).glob(pattern):
            if path.is_file():
                shutil.copyfile(path, scratch / path.name)
    return saved


def _matched(model: nn.Module, sources: Mapping[str, Source], config: str | os.PathLike[str]) -> dict[int, Source]:
    """Return what stands for each parameter and buffer of a model, by `id`.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    state = model.state_dict(keep_vars=True)
    named = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in state}
    missing = sorted(set(named) - set(sources))
    unknown = sorted(set(sources) - set(state))
    shapes = [
        f"{name} is {sources[name].shape}, not {tuple(tensor.shape)}"
        for name, tensor in named.items()
        if name in sources and sources[name].shape != tuple(tensor.shape)
    ]
    if missing or unknown or shapes:
        lists = {"missing": missing, "not in the model": unknown, "of another shape": shapes}
        told = "; ".join(f"{what}: {', '.join(names[:4])} ({len(names)})" for what, names in lists.items() if names)
        raise CheckpointError(
            f"the checkpoint is not of a {type(model).__name__} as config {config} says: {told}. Name another config, "
            "or pass config=False, which writes the parameters under the names that the checkpoint has"
        )
    return {id(tensor): sources[name] for name, tensor in named.items()}


def _check_ties(model: nn.Module, checkpoint: Checkpoint, config: str | os.PathLike[str]) -> None:
    """Raise CheckpointError where the model ties what was trained apart: of those only one would be written."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and {name, other} <= checkpoint.parameters.keys():
            raise CheckpointError(
                f"{other} and {name} are two parameters in the checkpoint, and one in a {type(model).__name__} as "
                f"config {config} says: set tie_word_embeddings in it to false, or pass config=False"
            )


def _plan(tensors: Mapping[str, SavedParameter], saved: Sequence[saver.SavedFile]) -> _Copying:
    files = [
        lay_out(file.name, {key: (part.dtype, part.shape) for key, part in file.tensors.items()}, file.metadata)
        for file in saved
    ]
    writes = plan_writes([(layout, file.tensors) for layout, file in zip(files, saved, strict=True)])
    return _Copying(files, writes, {name: each.pieces[FP32] for name, each in tensors.items()})


def _write(
    copying: _Copying,
    checkpoint: Checkpoint,
    scratch: Path,
    report: SaveReport,
    processes: int,
    progress: bool | None,
) -> None:
    """Write the folder, all at once."""
    total = total_bytes(copying.writes)
    staging = folders.make_staging(report.folder, sum(file.nbytes for file in copying.files))
    try:
        for file in copying.files:
            folders.make_file(staging, file.name, file.header, file.nbytes)
        paths = [staging.path / file.name for file in copying.files]
        chunks = list(chunks_of(copying.writes, copying.pieces))
        with progress_bar(total, "Consolidating", progress, 0) as update, report.phase("write"):

            def on_bytes(num_bytes: int) -> None:
                update(num_bytes)
                report.sample_memory()

            copied = copy_in_processes(chunks, checkpoint.files, paths, on_bytes, processes)
        if copied.written_bytes != total:
            raise PlanError(f"{report.folder}: {copied.written_bytes} bytes were written of {total}")
        with report.phase("rename"):
            folders.put_beside(staging, scratch)
            folders.commit(staging, [file.name for file in copying.files])
    except BaseException:
        folders.discard(staging)
        raise
    report.files = {file.name: file.nbytes for file in copying.files}
    report.num_masters = sum(each.group is not None for each in checkpoint.parameters.values())
    report.written_bytes, report.num_writes = copied.written_bytes, copied.num_writes
    report.staged_bytes = copied.staged_bytes
