"""consolidate: makes a Hugging Face folder of a training checkpoint by byte ranges."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from lowmem_load.distributed.environment import ranks_on_node
from lowmem_load.distributed.steps import Alone, RankGroup
from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.files.executor import Executor
from lowmem_load.files.index import read_json
from lowmem_load.files.memory import scatter_elements
from lowmem_load.files.remote_file import requests_in_flight
from lowmem_load.files.stand_ins import is_url, origin
from lowmem_load.load.checks import agree_on_bytes, identify_files
from lowmem_load.models import peft, saver
from lowmem_load.models.active import load_lock
from lowmem_load.models.model_class import PROCESSOR_FILES, TOKENIZER_FILES
from lowmem_load.models.model_folder import find_file
from lowmem_load.phases import Progress
from lowmem_load.planning.expression import Source
from lowmem_load.planning.nest import Nest, extent, nests_within
from lowmem_load.planning.proof import prove_names
from lowmem_load.planning.regions import FlatRange, partition_range
from lowmem_load.renamed import renamed_keywords
from lowmem_load.text import fingerprint
from lowmem_load.training_checkpoints.open_model import ADAPTER_CONFIG, SHARDS, SavedModel, open_model
from lowmem_load.training_checkpoints.saved_state import BandedTensor, are_equal, own_files, read_chunks
from lowmem_load.training_checkpoints.zero_checkpoint import differences_of
from lowmem_load.weights_out.buckets import PlannedTensor, Unit
from lowmem_load.weights_out.rank_shards import MemoryPiece
from lowmem_load.weights_out.save import SaveReport, write
from lowmem_load.weights_out.send import Tensors, place_constants
from lowmem_load.weights_out.weights import Weights, used_sources

Name: TypeAlias = "str | os.PathLike[str]"
"""A folder, or a model on the Hub."""

COPIED_FILES = (
    *(*TOKENIZER_FILES, *PROCESSOR_FILES, "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Files of a tokenizer or processor, which are copied into the folder."""

ADAPTER_FOLDER = "adapter"
"""Folder for the adapters of a checkpoint that has their base model, too."""

CHUNK_BYTES = 32 << 20
"""Most bytes of a tensor that are in memory at a time."""

_OF_ADAPTER = "adapter: "
"""Before the names of an adapter's tensors in a plan, which has those of its base, too."""


@renamed_keywords(checkpoint_folder="checkpoint", output_folder="folder")
def consolidate(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tag: str | None = None,
    part: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    config: str | os.PathLike[str] | Literal[False] | None = None,
    ranks: RankGroup | None = None,
) -> SaveReport:
    """Make a Hugging Face folder of a training checkpoint of DeepSpeed, FSDP2, torch DCP or verl.

    It takes what DeepSpeed's `save_checkpoint` writes under ZeRO-3, torch DCP (`.metadata` with `.distcp` or
    safetensors files), and the files of ranks of verl (`model_world_size_8_rank_3.pt`) and accelerate
    (`use_dcp=False`). The files say which it is. It does not run a pickle, and does not need a GPU or a process group.
    A new folder on a disk appears all at once. Adapters go into it if the checkpoint has nothing else, otherwise into
    its folder `adapter`. Returns what this process has written. Memory: buffers of 40 MiB (240 MiB to a store), and the
    description of the checkpoint: some MiB, or 1.5 GiB for 512,000 chunks.

    Args:
        checkpoint: folder that the trainer saved to, e.g. `checkpoint-500` of Trainer and accelerate. Or a URL, as for
            `load_model`, whose files are read by ranges.
        folder: folder to write, which is made if it is not there. It may be in a store, as for `save_model`.
        tag: tag of a DeepSpeed checkpoint. Default: the one that the file `latest` names.
        part: part of the state dict that is the model, e.g. "model" or "ema". Default: found by its name.
        dtype: dtype of floating-point tensors: fp64, fp32, fp16 or bf16. Default: as saved; for ZeRO, the optimizer's
            fp32.
        max_shard_size: largest size of a file, in bytes or as text. Default: "5GB".
        config: folder with config.json, or a model on the Hub, whose `save_pretrained` names the parameters. False
            keeps the names of the checkpoint, and tied parameters under each name. Default: the config.json in the
            checkpoint or its `huggingface/`; without one, as False.
        ranks: a `DistributedInterface`, whose ranks share the work and all make this call. Default: this process does
            all of it.

    Raises:
        CheckpointError: the checkpoint is incomplete, malformed or truncated, or of another model than `config`.
        ConfigError: the folder or an argument cannot be used.
        UnsupportedError: DeepSpeed's model parallelism, compressed chunks, or a conversion that needs full tensors.
        RankError: another process failed; the same error is raised in each.

    Example:
        report = consolidate("checkpoints", "out", config="Qwen/Qwen3-8B", dtype=torch.bfloat16)
        print(report.files, report.left_out)
        model = AutoModelForCausalLM.from_pretrained("out")
    """
    if dtype is not None and dtype not in saver.DTYPES:
        raise ConfigError(f"consolidate: dtype={dtype!r}, expected None or one of {saver.DTYPES}")
    ranks = Alone() if ranks is None else ranks
    num_threads = requests_in_flight(ranks_on_node(ranks.world_size)) if is_url(checkpoint) else 1
    with Executor(num_threads=num_threads) as executor:
        executor.tasks.check = ranks.check

        def weights(scratch: Path) -> Weights:
            with ranks.step("opening the checkpoint", name=origin(os.fspath(checkpoint))) as step:
                saved = open_model(os.fspath(checkpoint), executor, tag=tag, part=part)
                read = (f"{os.path.basename(file.path)} {file.nbytes} {file.digest}" for file in saved.files)
                step.digest = {"checkpoint": fingerprint(read)}
                step.payload = identify_files(saved.files)
            # Two saves of one run have equal names, sizes and shapes.
            agree_on_bytes(ranks, saved.folder, saved.files, executor.sources, step.payloads)
            in_files = dtype or (torch.float32 if saved.num_masters else None)
            options = {"dtype": in_files, "max_shard_size": max_shard_size}
            tensors, files, left_out = _describe_folder(saved, scratch, executor, config, options)
            source = f"a checkpoint of {saved.kind}: {len(saved.files)} files"
            source += f"; {saved.removed} was removed from all names" if saved.removed else ""
            buffer, shares = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu"), {}
            for name, tensor in tensors.items():
                region = partition_range(tensor.numel, ranks.rank, ranks.world_size)
                shares[name] = ShareOfTensor(name, tensor, region, executor, buffer)
            return Weights(
                files,
                shares,
                deliver=functools.partial(_read_pieces, ranks, shares),
                left_out=left_out,
                num_masters=saved.num_masters,
                source=source,
            )

        return write(ranks, folder, weights, {"dtype": dtype}, title="consolidate")


@dataclass(frozen=True, slots=True)
class ShareOfTensor:
    """The elements of a tensor of a checkpoint that this process copies, through a buffer."""

    name: str
    tensor: BandedTensor
    region: FlatRange
    executor: Executor
    buffer: torch.Tensor

    def memory(self) -> contextlib.AbstractContextManager[Iterator[MemoryPiece]]:
        """Yield the elements chunk by chunk. Each is overwritten by the next one."""
        return contextlib.closing(read_chunks(self.name, self.tensor, self.region, self.executor, self.buffer))


@contextlib.contextmanager
def _read_pieces(
    ranks: RankGroup, shares: Mapping[str, ShareOfTensor], units: Sequence[Unit], to: Sequence[int]
) -> Iterator[Iterator[Tensors]]:
    """See `Deliver`. Each rank reads the pieces of its own files."""
    num_read = 0

    def pieces() -> Iterator[Tensors]:
        nonlocal num_read
        for unit, rank in zip(units, to, strict=True):
            yield [(piece.name, _read_piece(piece, shares)) for piece in unit.sent] if rank == ranks.rank else []
            num_read += 1

    def progress() -> Progress:
        return Progress(num_read, f"{num_read} of {len(units)} pieces uploaded")

    with ranks.step("writing", progress=progress):
        yield pieces()


def _read_piece(piece: PlannedTensor, shares: Mapping[str, ShareOfTensor]) -> torch.Tensor:
    """Return a piece of a file, read by spans of the tensors of the checkpoint. Spans that overlap are read once."""
    value = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
    place_constants(piece, value)
    wanted: list[tuple[Source, FlatRange, list[Nest]]] = []
    pairs = [(copy.leaf, copy.nest) for copy in piece.copies if isinstance(copy.leaf, Source)]
    for leaf, nest in sorted(pairs, key=lambda pair: (pair[0].name, pair[1].source)):
        start, end, nests = nest.source, nest.source + extent(nest.axes, "source"), [nest]
        if wanted and wanted[-1][0].name == leaf.name and start < wanted[-1][1].end:
            _, before, others = wanted.pop()
            start, end, nests = before.start, max(end, before.end), [*others, nest]
        wanted.append((leaf, FlatRange(start, end), nests))
    for leaf, span, nests in wanted:
        with replace(shares[leaf.name], region=span).memory() as chunks:
            for memory, region in chunks:
                for nest in nests:
                    for part in nests_within(nest, region, leaf.shape):
                        scatter_elements(part, memory, value)
    return value


# -- what the files of the new folder are ------------------------------------------------------------------------------


def _describe_folder(
    model: SavedModel, scratch: Path, executor: Executor, config: Name | bool | None, options: Mapping[str, Any]
) -> tuple[dict[str, BandedTensor], list[saver.SavedFile], list[str]]:
    """Return the tensors of the plan, the files of weights, and the names of tensors that are in none of them.

    Writes the files without weights to `scratch`. The adapter's tensors have the names under which PEFT saves them.
    """
    named = None if isinstance(config, bool) else config
    config = model.companion("config.json") if config is None else named
    if config:
        model = model.without_wrappers()
    tensors, adapter, left_out = model.tensors, dict[str, BandedTensor](), list(model.left_out)
    if model.adapter is not None:
        folder, values = _adapter_config(model, named)
        tensors, adapter, others = _split(model, folder, config)
        left_out += others
    files: list[saver.SavedFile] = []
    if tensors and config:
        with load_lock():
            files, others = _as_saved_by_transformers(tensors, scratch, executor, config, options)
        _copy_tokenizer(model, scratch, config)
        left_out += others
    elif tensors and model.kind == SHARDS:
        raise ConfigError(
            f"{model.folder}: its files do not say how large the tensors are, so a missing last one would not be "
            "noticed: name the model by config"
        )
    elif tensors:
        files = saver.describe_plain(_sources(tensors), scratch, **options)
    if adapter:
        place = scratch / ADAPTER_FOLDER if tensors else scratch
        place.mkdir(exist_ok=True)
        if tensors and isinstance(values.get("init_lora_weights"), str):
            values["init_lora_weights"] = True  # such as PiSSA, which would change the base once more
        (place / ADAPTER_CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        name = (place / "adapter_model.safetensors").relative_to(scratch).as_posix()
        files.append(saver.plain_file(name, _sources(adapter, _OF_ADAPTER), options["dtype"]))
    return {**tensors, **{_OF_ADAPTER + name: tensor for name, tensor in adapter.items()}}, files, left_out


def _adapter_config(model: SavedModel, config: Name | None) -> tuple[str, dict[str, Any]]:
    """Return a folder with the configuration of a model's adapter, which few trainers save, and its content.

    `config` is another folder that may have it.
    """
    places = [*model.near, *([] if config is None else [os.fspath(config)])]
    path = next((path for place in places for path in own_files(place, [ADAPTER_CONFIG])), None)
    if path is None:
        place = next(near for near in reversed(model.near) if os.path.isdir(near))
        raise CheckpointError(
            f"{model.folder}: has adapters, but no {ADAPTER_CONFIG} says their scale (lora_alpha). Make one with "
            f"the training's arguments: peft.LoraConfig(r=..., lora_alpha=...).save_pretrained({place!r}); in "
            "a training program, model.peft_config['default'].save_pretrained(...) does. Or copy it to config's folder"
        )
    values = read_json(path)
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: is not a configuration of an adapter")
    kind = values.get("peft_type")
    if model.adapter and kind not in ("LORA", "TRAINABLE_TOKENS"):  # code of PEFT for others may do anything
        raise CheckpointError(
            f"{path}: peft_type is {kind!r:.80}, and the adapter is of LoRA: it is of another adapter"
        )
    if kind == "LORA" and not model.adapter:
        _check_lora(path, values, model.tensors)
    return os.path.dirname(path), values


def _check_lora(path: str, values: Mapping[str, Any], tensors: Mapping[str, BandedTensor]) -> None:
    """Raise CheckpointError if a configuration of LoRA is not that of the tensors, which PEFT has named."""
    has_magnitudes = any(name.endswith(".lora_magnitude_vector") for name in tensors)
    if has_magnitudes != bool(values.get("use_dora")):
        raise CheckpointError(
            f"{path}: use_dora is {values.get('use_dora')!r:.80}, but the checkpoint "
            f"{'has' if has_magnitudes else 'lacks'} tensors lora_magnitude_vector: it is of another adapter"
        )
    pattern = values.get("rank_pattern") or {}
    ranks = [values.get("r"), *(pattern.values() if isinstance(pattern, dict) else [None])]
    if not all(type(rank) is int and 0 < rank < 1 << 31 for rank in ranks):
        raise CheckpointError(f"{path}: r, or a value of rank_pattern, is not the rank of an adapter; copy it again")
    if values.get("target_parameters") or values.get("megatron_config"):
        return  # all experts have one tensor
    allowed = set(ranks)
    for name, tensor in tensors.items():
        if name.endswith((".lora_A.weight", ".lora_embedding_A")) and allowed.isdisjoint(tensor.shape[:1]):
            raise CheckpointError(
                f"{path}: says r={values['r']}, but {name} is of shape {tensor.shape}: it is of another adapter"
            )


def _split(
    model: SavedModel, folder: str, config: Name | None
) -> tuple[Mapping[str, BandedTensor], dict[str, BandedTensor], list[str]]:
    """Return the tensors of the base model, those of the adapter as PEFT would save them, and the names of others.

    `folder` has the configuration of the adapter.
    """
    wrapped = model.tensors
    if not model.adapter:
        return {}, dict(wrapped), []
    if not config:
        raise ConfigError(
            f"{model.folder}: has an adapter; which of its tensors PEFT saves, and under which names, depends on the "
            "model: name that by config"
        )
    with load_lock():
        shapes = {name: tensor.shape for name, tensor in wrapped.items()}
        names = peft.names_in(saver.model_of(config), folder, model.adapter, shapes)
    new_names = {old: new for old, (new, _) in names.base.items()}
    prove_names(model.folder, wrapped, new_names, wrapped.keys() - new_names.keys())
    base, left_out = {new: wrapped[old] for old, new in new_names.items()}, names.left_out
    if any(_is_packed(old, wrapped[old], shape) for old, (_, shape) in names.base.items()):
        base, left_out = {}, [*left_out, *base]
    return base, {new: wrapped[old] for new, old in names.adapter.items()}, left_out


def _is_packed(name: str, tensor: BandedTensor, shape: Sequence[int]) -> bool:
    """Return whether a weight is quantized. Its scales are not parameters, so sharded state dicts have none."""
    is_half = tensor.numel * tensor.dtype.itemsize * 2 == math.prod(shape)
    return name.endswith(".base_layer.weight") and (is_half or not tensor.dtype.is_floating_point)


def _sources(tensors: Mapping[str, BandedTensor], before: str = "") -> dict[str, Source]:
    return {name: Source("", before + name, 0, tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _as_saved_by_transformers(
    tensors: Mapping[str, BandedTensor], scratch: Path, executor: Executor, config: Name, options: Mapping[str, Any]
) -> tuple[list[saver.SavedFile], list[str]]:
    """Return the files in which transformers saves the model of a configuration, and the tensors that are in none."""
    sources = _sources(tensors)
    model = saver.model_of(config)
    state = model.state_dict(keep_vars=True)
    named = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in state}
    if differences := differences_of(sources, named, sources.keys() - state.keys(), "model"):
        raise CheckpointError(
            f"the checkpoint is not of a {type(model).__name__} as config {config} says: {differences}. Name another "
            f"config, or pass {saver.NO_CONFIG}, which writes the parameters under the names that the checkpoint has. "
            "Models that were trained under transformers 4 may have the names of the files on the Hub already; weights "
            "of Megatron and of torchtitan's own models need the scripts of these first"
        )
    _check_ties(model, tensors, executor, config)
    of_model = {id(tensor): sources[name] for name, tensor in named.items() if name in sources}
    saver.give_dtypes(model, {key: source.dtype for key, source in of_model.items()})
    files = saver.describe_save_pretrained(model, scratch, of_model, kwargs={}, **options)
    used = used_sources(files)
    written = {name for name in sources if (source := of_model.get(id(state[name]))) and source.name in used}
    return files, [name for name in sources if name not in written]


def _copy_tokenizer(model: SavedModel, scratch: Path, config: Name) -> None:
    """Copy the trained tokenizer, which is the checkpoint's; if it has none, that of the configuration."""
    for place in model.near:
        if files := own_files(place, COPIED_FILES):
            break
    else:
        files = [path for file in COPIED_FILES if (path := find_file(os.fspath(config), file, {}))]
    for path in files:
        shutil.copyfile(path, scratch / os.path.basename(path))


def _check_ties(model: nn.Module, tensors: Mapping[str, BandedTensor], executor: Executor, config: Name) -> None:
    """Raise CheckpointError where the model ties two parameters that the checkpoint has apart: one would be lost."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in tensors:
            continue
        other = first.setdefault(id(parameter), name)
        one, two = tensors[other], tensors[name]
        if one is not two and not are_equal(name, one.whole, two.whole, executor):
            raise CheckpointError(
                f"{other} and {name} are two parameters in the checkpoint, and one in a {type(model).__name__} as "
                f"config {config} says: set tie_word_embeddings in it to false, or pass {saver.NO_CONFIG}"
            )
