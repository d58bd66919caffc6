"""consolidate: makes a Hugging Face folder of a training checkpoint by byte ranges."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lowmem_load.distributed.steps import Alone, RankGroup
from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.frameworks import peft
from lowmem_load.hf import saver
from lowmem_load.hf.hub_files import files_beside
from lowmem_load.hf.load_lock import load_lock
from lowmem_load.io.executor import Executor
from lowmem_load.io.fill import Part, fill
from lowmem_load.phases import without_progress
from lowmem_load.pipeline.same_bytes import agree_on_bytes, identify_files
from lowmem_load.planning.expression import Source
from lowmem_load.planning.regions import FlatRange, partition_range
from lowmem_load.resume.hub_names import as_loaded
from lowmem_load.saving.folder import refuse_url
from lowmem_load.saving.local_shards import MemoryPiece
from lowmem_load.saving.write_folder import Contents, write_folder
from lowmem_load.saving.writer import SaveReport, used_sources
from lowmem_load.text import fingerprint
from lowmem_load.training_checkpoints.adapter_config import ADAPTER_CONFIG, adapter_config, check_names_suffice
from lowmem_load.training_checkpoints.open_model import SavedModel, Values, open_model, own_files
from lowmem_load.training_checkpoints.zero_checkpoint import differences_of

BESIDE = (
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""Files of a tokenizer or processor, which are copied into the folder."""

ADAPTER_FOLDER = "adapter"
"""Folder for the adapters of a checkpoint that has their base model, too."""

CHUNK_BYTES = 32 << 20
"""Most bytes of a tensor that are in memory at a time."""

_OF_ADAPTER = "adapter: "
"""Before the names of an adapter's tensors in a plan, which has those of its base, too."""


@without_progress
def consolidate(
    checkpoint_folder: str | os.PathLike[str],
    output_folder: str | os.PathLike[str],
    *,
    tag: str | None = None,
    part: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    config: str | os.PathLike[str] | Literal[False] | None = None,
) -> SaveReport:
    """Make a Hugging Face folder of a training checkpoint of DeepSpeed, FSDP2, torch DCP or verl.

    Takes what DeepSpeed's `save_checkpoint` writes under ZeRO; torch DCP (`.metadata` with `.distcp` or safetensors
    files); and the files of ranks of verl (`model_world_size_8_rank_3.pt`) and accelerate (`use_dcp=False`). The files
    say which it is. No pickle is run. Needs no GPU and no process group. A new folder appears all at once. Adapters go
    into it, if the checkpoint has nothing else, else into its folder `adapter`. Returns what this process has written.
    Memory: buffers of 40 MiB, and the description of the checkpoint: some MiB; 1.5 GiB for 512,000 chunks.

    Args:
        checkpoint_folder: the folder that was saved to; of Trainer and accelerate also `checkpoint-500`.
        output_folder: made if it is not there.
        tag: of a checkpoint of DeepSpeed. None: the one that the file `latest` names.
        part: of the state dict, which is the model: "model", "ema". None: found by its name.
        dtype: of floating-point tensors: fp64, fp32, fp16 or bf16. None: as saved; of ZeRO, the optimizer's fp32.
        max_shard_size: bytes, or text such as "5GB".
        config: folder with config.json, or a model on the Hub, whose `save_pretrained` names the parameters so. None:
            the config.json in the checkpoint or its `huggingface/`. False, or without one: the names of the checkpoint,
            and tied parameters under each name.

    Raises:
        CheckpointError: the checkpoint is incomplete, malformed or truncated, or of another model than `config`.
        ConfigError: the folder or an argument cannot be used.
        UnsupportedError: DeepSpeed's model parallelism, compressed chunks, or a conversion that needs whole tensors.
        RankError: another process failed; the same error is raised in each.
    """
    how: dict[str, Any] = {"tag": tag, "part": part, "dtype": dtype, "max_shard_size": max_shard_size, "config": config}
    return consolidate_on(Alone(), checkpoint_folder, output_folder, **how)


def consolidate_on(
    ranks: RankGroup,
    checkpoint_folder: str | os.PathLike[str],
    output_folder: str | os.PathLike[str],
    *,
    tag: str | None = None,
    part: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    config: str | os.PathLike[str] | Literal[False] | None = None,
) -> SaveReport:
    """Do what `consolidate` does; the ranks share the work. Collective."""
    if dtype is not None and dtype not in saver.DTYPES:
        raise ConfigError(f"consolidate: dtype={dtype!r}, expected None or one of {saver.DTYPES}")
    report = SaveReport(os.fspath(output_folder), rank=ranks.rank, world_size=ranks.world_size)
    with Executor() as executor, ranks.session("consolidate"):
        with report.phase("plan"):
            saved = _open(ranks, os.fspath(checkpoint_folder), report.folder, executor, tag, part)

        def contents(scratch: Path) -> Contents:
            in_files = dtype or (torch.float32 if saved.num_masters else None)
            model, files = _describe_folder(saved, scratch, executor, config, in_files, max_shard_size)
            report.num_masters, report.left_out = model.num_masters, list(model.left_out)
            tensors = {**model.tensors, **{_OF_ADAPTER + name: tensor for name, tensor in model.adapter.items()}}
            buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")
            spans = {name: partition_range(t.numel, ranks.rank, ranks.world_size) for name, t in tensors.items()}
            elements = {name: ShareOfTensor(name, t, spans[name], executor, buffer) for name, t in tensors.items()}
            return Contents(files, elements)

        write_folder(ranks, report, contents, {"dtype": dtype})
    report.source = f"a checkpoint of {saved.kind}: {len(saved.files)} files"
    report.source += f"; {saved.removed} was removed from all names" if saved.removed else ""
    return report


def _open(
    ranks: RankGroup, folder: str, output_folder: str, executor: Executor, tag: str | None, part: str | None
) -> SavedModel:
    """Return the model in a checkpoint, whose files all ranks see alike. Collective."""
    with ranks.step("opening the checkpoint", name=folder) as step:
        refuse_url(output_folder)
        saved = open_model(folder, executor, tag=tag, part=part)
        read = (f"{os.path.basename(file.path)} {file.nbytes} {file.digest}" for file in saved.files)
        step.digest = {"checkpoint": fingerprint(read)}
        step.payload = identify_files(saved.files)
    if ranks.world_size > 1:  # of equal names, sizes and shapes are two saves of one run, too
        num_threads, sources = executor.num_threads, executor.sources
        agree_on_bytes(ranks, saved.folder, saved.files, sources=sources, ids=step.payloads, num_threads=num_threads)
    return saved


@dataclass(frozen=True, slots=True)
class ShareOfTensor:
    """The elements of a tensor of a checkpoint that this process copies, through a buffer."""

    name: str
    tensor: Values
    span: FlatRange
    executor: Executor
    buffer: torch.Tensor

    @property
    def mine(self) -> tuple[FlatRange, ...]:
        """One range."""
        return (self.span,)

    def memory(self) -> contextlib.AbstractContextManager[Iterator[MemoryPiece]]:
        """Yield the elements chunk by chunk. Each is overwritten by the next one."""
        return contextlib.closing(self._chunks())

    def _chunks(self) -> Generator[MemoryPiece, None, None]:
        step = self.buffer.numel() // self.tensor.dtype.itemsize
        for start in range(self.span.start, self.span.end, step):
            elements = FlatRange(start, min(start + step, self.span.end))
            memory = self.buffer.view(self.tensor.dtype)[: elements.numel]
            fill([Part(self.name, *self.tensor.part(elements), memory)], self.executor)
            yield memory, start


# -- what the files of the new folder are ------------------------------------------------------------------------------


def _describe_folder(
    saved_model: SavedModel,
    scratch: Path,
    executor: Executor,
    config: str | os.PathLike[str] | bool | None,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
) -> tuple[SavedModel, list[saver.SavedFile]]:
    """Return what is written, and the files of weights; write the others to `scratch`."""
    saved: list[saver.SavedFile] = []
    named = None if isinstance(config, bool) else config
    config = saved_model.companion("config.json") if config is None else named
    model: Any = None
    if config and (saved_model.tensors or saved_model.adapted is not None):
        saved_model = saved_model.without_wrappers()
    if saved_model.tensors and config and _is_alone(saved_model, scratch, config, named):
        saved_model = replace(saved_model, tensors={})
    if saved_model.tensors and config:
        with load_lock():
            model, tensors = _model_of(config, saved_model.tensors, executor)
            saved_model = replace(saved_model, tensors=tensors)
            plain = copy.deepcopy(model) if saved_model.adapter else None  # which PEFT wraps
            saved, left_out = _as_saved_by_transformers(
                saved_model, model, scratch, executor, config, dtype, max_shard_size
            )
        saved_model = replace(saved_model, left_out=(*saved_model.left_out, *left_out))
        model = plain
    elif saved_model.tensors and not saved_model.has_shapes:
        raise ConfigError(
            f"{saved_model.folder}: its files do not say how large the tensors are, so a missing last one would not be "
            "noticed: name the model by config"
        )
    elif saved_model.tensors:
        sources = _sources(saved_model.tensors)
        saved = saver.describe_plain(sources, scratch, dtype=dtype, max_shard_size=max_shard_size)
    if saved_model.adapter:
        place = scratch / ADAPTER_FOLDER if saved_model.tensors else scratch
        saved_model = _describe_adapter(saved_model, model, place, config, named)
        name = (place / "adapter_model.safetensors").relative_to(scratch).as_posix()
        saved.append(saver.plain_file(name, _sources(saved_model.adapter, _OF_ADAPTER), dtype))
    return saved_model, saved


def _is_alone(
    saved_model: SavedModel, scratch: Path, config: str | os.PathLike[str], named: str | os.PathLike[str] | None
) -> bool:
    """Whether the tensors of the base are those that PEFT saves with the adapter: biases that were trained."""
    adapted = saved_model.adapted
    if adapted is None or adapted.adapter is None or len(adapted.base) > len(adapted.saved):
        return False  # most, without building a model
    try:
        without = replace(saved_model, tensors={})
        alone = _describe_adapter(without, None, scratch / "alone", config, named)
    except CheckpointError:  # better said of the base
        return False
    finally:
        shutil.rmtree(scratch / "alone", ignore_errors=True)
    written = {id(tensor) for tensor in alone.adapter.values()}
    return all(id(tensor) in written for tensor in adapted.wrapped.values())


def _describe_adapter(
    saved_model: SavedModel,
    model: Any,
    place: Path,
    config: str | os.PathLike[str] | None,
    named: str | os.PathLike[str] | None,
) -> SavedModel:
    """Return the model with the adapter as PEFT would save it; write the adapter's configuration to `place`."""
    values, adapted = adapter_config(saved_model, named), saved_model.adapted
    place.mkdir(exist_ok=True)
    if saved_model.tensors and isinstance(values.get("init_lora_weights"), str):
        values["init_lora_weights"] = True  # such as PiSSA, which would change the base once more
    (place / ADAPTER_CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if adapted is None or adapted.adapter is None:
        return saved_model
    if not config:
        check_names_suffice(saved_model, values)
        return saved_model
    shapes = {name: tensor.shape for name, tensor in adapted.wrapped.items()}
    with load_lock():
        base = saver.model_of(config) if model is None else model
        saved, tied = peft.saved_names(base, os.fspath(place), adapted.adapter, shapes, adapted.own)
    tensors = {new: adapted.wrapped[old] for new, old in saved.items()}
    return replace(saved_model, adapted=replace(adapted, saved=tensors), left_out=(*saved_model.left_out, *tied))


def _sources(tensors: Mapping[str, Values], before: str = "") -> dict[str, Source]:
    return {name: Source("", before + name, 0, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _as_saved_by_transformers(
    saved_model: SavedModel,
    model: Any,
    scratch: Path,
    executor: Executor,
    config: str | os.PathLike[str],
    dtype: torch.dtype | None,
    max_shard_size: int | str,
) -> tuple[list[saver.SavedFile], list[str]]:
    """Return the files of weights, and the tensors of which they have nothing."""
    sources = _sources(saved_model.tensors)
    _check_ties(model, saved_model.tensors, config, executor)
    named = (*model.named_parameters(), *model.named_buffers())
    of_model = {id(tensor): sources[name] for name, tensor in named if name in sources}
    saver.give_dtypes(model, {key: source.dtype for key, source in of_model.items()})
    options: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size, "kwargs": {}}
    saved = saver.describe_save_pretrained(model, scratch, of_model, **options)
    # The trained tokenizer is the checkpoint's; where it has none, that of the configuration.
    for place in filter(os.path.isdir, saved_model.near):
        if files := own_files(place, BESIDE):
            break
    else:
        files = files_beside(os.fspath(config), BESIDE)
    for path in files:
        shutil.copyfile(path, scratch / os.path.basename(path))
    used = used_sources(saved)
    state = model.state_dict(keep_vars=True)
    written = {name for name in sources if (source := of_model.get(id(state[name]))) and source.name in used}
    return saved, [name for name in sources if name not in written]


def _model_of(
    config: str | os.PathLike[str], tensors: Mapping[str, Values], executor: Executor
) -> tuple[Any, Mapping[str, Values]]:
    """Return the model of a configuration that has these tensors, of its architecture or a critic, under its names."""
    model, sources = saver.model_of(config), _sources(tensors)
    differences = _differences(model, sources)
    if not differences:
        return model, tensors
    if (head := sources.get("score.weight")) is not None:
        critic = saver.critic_of(config, head.shape[0])
        if critic is not None and not _differences(critic, sources):
            return critic, tensors
    loaded = as_loaded(model, config, tensors, executor)
    if isinstance(loaded, str):
        differences += f". Under the names of files on the Hub: {loaded}"
    elif not _differences(model, _sources(loaded)):
        return model, loaded
    raise CheckpointError(
        f"the checkpoint is not of a {type(model).__name__} as config {config} says: {differences}. Name another "
        f"config, or pass {saver.NO_CONFIG}, which writes the parameters under the names that the checkpoint has. "
        "Weights of Megatron and of torchtitan's own models need the scripts of these first"
    )


def _differences(model: nn.Module, sources: Mapping[str, Source]) -> str:
    state = model.state_dict(keep_vars=True)
    named = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in state}
    shapes = {name: source.shape for name, source in sources.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in named.items()}
    return differences_of(shapes, expected, set(sources) - set(state), "model")


def _check_ties(
    model: nn.Module, tensors: Mapping[str, Values], config: str | os.PathLike[str], executor: Executor
) -> None:
    """Raise CheckpointError where the model ties two parameters that the checkpoint has apart: one would be lost."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other == name or not {name, other} <= tensors.keys() or tensors[name] is tensors[other]:
            continue
        if not _are_equal(name, tensors[other], tensors[name], executor):
            raise CheckpointError(
                f"{other} and {name} are two parameters in the checkpoint, and one in a {type(model).__name__} as "
                f"config {config} says: set tie_word_embeddings in it to false, or pass {saver.NO_CONFIG}"
            )


def _are_equal(name: str, one: Values, other: Values, executor: Executor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    with contextlib.ExitStack() as stack:
        chunks = [
            stack.enter_context(ShareOfTensor(name, values, FlatRange(0, values.numel), executor, buffer).memory())
            for values in (one, other)
            for buffer in [torch.empty(CHUNK_BYTES // 2, dtype=torch.uint8, device="cpu")]
        ]
        return all(
            torch.equal(mine.view(torch.uint8), its.view(torch.uint8))
            for (mine, _), (its, _) in zip(*chunks, strict=True)
        )
