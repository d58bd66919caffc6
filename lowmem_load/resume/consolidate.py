"""consolidate: makes a Hugging Face folder of a ZeRO checkpoint by byte ranges, without a process group."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from lowmem_load.errors import CheckpointError, ConfigError, PlanError
from lowmem_load.hf import saver
from lowmem_load.hf.load_lock import load_lock
from lowmem_load.io.executor import Executor
from lowmem_load.partial.partial_checkpoint import find_folder
from lowmem_load.phases import progress_bar
from lowmem_load.planning.expression import Source
from lowmem_load.planning.planner import Planner
from lowmem_load.planning.ranges import FlatRange
from lowmem_load.resume.open_checkpoint import open_checkpoint
from lowmem_load.resume.zero_checkpoint import FP32, Checkpoint, SavedParameter, differences_of
from lowmem_load.saving import folder as folders
from lowmem_load.saving.writer import (
    FileLayout,
    SaveReport,
    Write,
    Writer,
    lay_out_saved,
    own_writes,
    plan_writes,
    total_bytes,
)

BESIDE = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*processor_config.json", "chat_template*")
"""Files beside a configuration that are copied into the folder: what Trainer writes for the tokenizer."""

CHUNK_BYTES = 32 << 20
"""Most bytes of a parameter that are in memory at a time."""


def consolidate(
    checkpoint_folder: str | os.PathLike[str],
    output_folder: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    config: str | os.PathLike[str] | Literal[False] | None = None,
    progress: bool | None = None,
) -> SaveReport:
    """Make a Hugging Face folder of a checkpoint that DeepSpeed's `save_checkpoint` wrote under ZeRO.

    Takes what `load_checkpoint` takes. Needs no process group, GPU or DeepSpeed. The weights are the optimizer's fp32
    values; frozen parameters have the values that were saved. The folder appears all at once, as with `save_model`.

    Args:
        checkpoint_folder: the folder that `save_checkpoint` was given. It holds the folders of the tags.
        output_folder: made if it is not there.
        tag: of the checkpoint. None: the one that the file `latest` names.
        dtype: of floating-point tensors in the files: fp64, fp32, fp16 or bf16. None: fp32.
        max_shard_size: bytes, or text such as "5GB".
        config: folder with config.json, or name of a model on the Hub. The parameters are named as `save_pretrained`
            of that model names them. None: `checkpoint_folder`, if it has a config.json, as Trainer writes it. False,
            or without a config.json: the parameters keep the names of the checkpoint, and tied parameters are written
            under each name.
        progress: True shows a progress bar, False none, None one on long runs when stderr is a terminal.

    Returns:
        What was written.

    Memory: 40 MiB.

    Raises:
        CheckpointError: the checkpoint is incomplete, malformed or truncated, or of another model than `config`.
        ConfigError: the folder or an argument cannot be used.
        UnsupportedError: model parallelism, or a conversion that cannot be written piece by piece.
    """
    if dtype is not None and dtype not in saver.DTYPES:
        raise ConfigError(f"consolidate: dtype={dtype!r}, expected None or one of {saver.DTYPES}")
    report = SaveReport(os.fspath(output_folder))
    if config is None and os.path.isfile(os.path.join(checkpoint_folder, "config.json")):
        config = checkpoint_folder
    with tempfile.TemporaryDirectory(prefix="lowmem_load-") as name, Executor() as executor:
        scratch = Path(name)
        with report.phase("plan"):
            folder = find_folder(checkpoint_folder, tag)
            if folder is None:
                raise CheckpointError(f"{checkpoint_folder}: has no file 'latest'; name the tag")
            checkpoint = open_checkpoint(folder, executor)
            tensors = {**checkpoint.replicated, **checkpoint.of_module}
            tensors |= {name: tensors[other] for name, other in checkpoint.shared.items() if other in tensors}
            saved = _describe(checkpoint, tensors, scratch, config, dtype or torch.float32, max_shard_size)
            files = [lay_out_saved(file, scratch) for file in saved]
            writes = plan_writes(files)
        with progress_bar(total_bytes(writes), "Consolidating", progress, 0) as update:
            _write(files, writes, tensors, executor, scratch, report, update)
    report.num_masters = sum(saved.group is not None for saved in checkpoint.parameters.values())
    return report


def _describe(
    checkpoint: Checkpoint,
    tensors: Mapping[str, SavedParameter],
    scratch: Path,
    config: str | os.PathLike[str] | Literal[False] | None,
    dtype: torch.dtype,
    max_shard_size: int | str,
) -> list[saver.SavedFile]:
    sources = {name: Source("", name, 0, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    if config is None or config is False:
        return saver.describe_plain(sources, scratch, dtype=dtype, max_shard_size=max_shard_size)
    with load_lock():
        model = saver.model_of(config)
        model_sources = _match(model, sources, config)
        _check_ties(model, checkpoint, config)
        saved = saver.describe_save(
            model, scratch, model_sources, dtype=dtype, max_shard_size=max_shard_size, kwargs={}
        )
    for pattern in BESIDE if os.path.isdir(config) else ():
        for path in Path(config).glob(pattern):
            if path.is_file():
                shutil.copyfile(path, scratch / path.name)
    return saved


def _match(model: nn.Module, sources: Mapping[str, Source], config: str | os.PathLike[str]) -> dict[int, Source]:
    """Return the source of each parameter and buffer of a model, by `id`."""
    state = model.state_dict(keep_vars=True)
    named = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in state}
    shapes = {name: source.shape for name, source in sources.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in named.items()}
    differences = differences_of(shapes, expected, set(sources) - set(state), "model")
    if differences:
        raise CheckpointError(
            f"the checkpoint is not of a {type(model).__name__} as config {config} says: {differences}. Name another "
            "config, or pass config=False, which writes the parameters under the names that the checkpoint has"
        )
    return {id(tensor): sources[name] for name, tensor in named.items()}


def _check_ties(model: nn.Module, checkpoint: Checkpoint, config: str | os.PathLike[str]) -> None:
    """Raise CheckpointError where the model ties two parameters that the checkpoint has apart: one would be lost."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and {name, other} <= checkpoint.parameters.keys():
            raise CheckpointError(
                f"{other} and {name} are two parameters in the checkpoint, and one in a {type(model).__name__} as "
                f"config {config} says: set tie_word_embeddings in it to false, or pass config=False"
            )


# -- copying ---------------------------------------------------------------------------------------------------------


def _write(
    files: Sequence[FileLayout],
    writes: Sequence[Write],
    tensors: Mapping[str, SavedParameter],
    executor: Executor,
    scratch: Path,
    report: SaveReport,
    update: Callable[[int], object],
) -> None:
    def on_bytes(num_bytes: int) -> None:
        update(num_bytes)
        report.sample_memory()

    staging = folders.make_staging([folders.find_target(report.folder)], files)
    try:
        with report.phase("write"), Writer([staging.path / file.name for file in files], on_bytes) as writer:
            _copy(writes, tensors, executor, writer)
        if writer.written_bytes != total_bytes(writes):
            raise PlanError(f"{report.folder}: wrote {writer.written_bytes} bytes, expected {total_bytes(writes)}")
        with report.phase("rename"):
            folders.put_beside(staging, scratch)
            folders.commit(staging, [file.name for file in files])
    except BaseException:
        folders.discard(staging)
        raise
    report.files = {file.name: file.nbytes for file in files}
    report.written_bytes, report.staged_bytes = writer.written_bytes, writer.staged_bytes


def _copy(writes: Sequence[Write], tensors: Mapping[str, SavedParameter], executor: Executor, writer: Writer) -> None:
    buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")
    for name, mine in own_writes(
        writes, {name: [FlatRange(0, tensor.numel)] for name, tensor in tensors.items()}
    ).items():
        source = tensors[name]
        step = CHUNK_BYTES // source.dtype.itemsize
        for start in range(0, source.numel, step):
            elements = FlatRange(start, min(start + step, source.numel))
            planner = Planner()
            fill = planner.plan_fill(name, source.pieces[FP32].part(elements), FlatRange(0, elements.numel))
            memory = buffer.view(source.dtype)[: elements.numel]
            executor.fill(fill, memory, planner.values, planner.constants)
            executor.finish()
            writer.write_parts(mine, memory, start)
    executor.sources.check_unchanged()
    writer.sync()
