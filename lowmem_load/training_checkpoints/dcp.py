"""Opens checkpoints of torch DCP: `.metadata` with `.distcp` files, or safetensors files, each of one rank's parts.

The first kind is written by accelerate, Trainer, axolotl, LLaMA-Factory, torchtitan, NeMo, Megatron's torch_dist; the
second by `HuggingFaceStorageWriter` and transformers' `save_pretrained(distributed_checkpoint=True)`.

Source: torch 2.6 to 2.13 `distributed/checkpoint/filesystem.py`, `hf_storage.py`, `_hf_utils.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence

from lowmem_load.errors import CheckpointError, TruncatedFileError, listed
from lowmem_load.formats.dcp_metadata import Chunk, SavedTensor, read_metadata
from lowmem_load.formats.safetensors import Safetensors
from lowmem_load.formats.zipped_tensor import ZippedTensors
from lowmem_load.io.executor import Executor
from lowmem_load.planning.expression import Expression
from lowmem_load.planning.load_plan import PlannedFile
from lowmem_load.text import fingerprint
from lowmem_load.training_checkpoints.one_save import check_written_before, check_written_together
from lowmem_load.training_checkpoints.tiles import Tile, TiledTensor, assemble
from lowmem_load.training_checkpoints.weights import SavedState

METADATA = ".metadata"

_SHARD = re.compile(r"shard-(\d+)-.*\.safetensors")

SHARDING_INFO, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys in the header of a safetensors file that holds parts of tensors."""


def open_dcp(folder: str, executor: Executor) -> SavedState:
    """Return what a folder with a `.metadata` holds. Reads a KiB of each chunk, and no weights.

    Raises:
        CheckpointError: chunks are missing or overlap, files are truncated or of another save.
        UnsupportedError: chunks are compressed or encrypted.
    """
    path = os.path.join(folder, METADATA)
    with executor.sources.reading(path) as source:
        metadata = read_metadata(source)
        files = [PlannedFile(path, metadata.nbytes, metadata.digest, source.version)]
    by_file: dict[str, list[tuple[SavedTensor, Chunk]]] = {}
    for tensor in metadata.tensors.values():
        for chunk in tensor.chunks:
            by_file.setdefault(chunk.place.file, []).append((tensor, chunk))
    values: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Expression] = {}
    zips = ZippedTensors()
    for name, chunks in sorted(by_file.items()):
        chunks.sort(key=lambda item: item[1].place.start)
        files.append(_open_file(folder, name, chunks, executor))
        for tensor, chunk in chunks:
            with executor.sources.reading(files[-1].path) as source:
                expression = zips.find(source, chunk.place.start, chunk.place.nbytes, tensor.name)
            if (expression.shape, expression.dtype) != (chunk.sizes, tensor.dtype):
                raise CheckpointError(
                    f"{files[-1].path}: {tensor.name}: is {expression.dtype} of shape {expression.shape} at byte "
                    f"{chunk.place.start}, where .metadata says {tensor.dtype} of shape {chunk.sizes}: another save "
                    "has written one of them"
                )
            values[tensor.name, chunk.offsets, chunk.sizes] = expression
    check_written_before(path, [file.path for file in files[1:]])
    keys = Counter(tensor.keys for tensor in metadata.tensors.values())
    if twice := [".".join(key) for key, count in keys.items() if count > 1]:
        raise CheckpointError(f"{path}: has two tensors {listed(twice)}")
    tensors = {
        tensor.keys: assemble(
            f"{folder}: {tensor.name}",
            tensor.shape,
            (Tile(chunk.offsets, values[tensor.name, chunk.offsets, chunk.sizes]) for chunk in tensor.chunks),
        )
        for tensor in metadata.tensors.values()
    }
    return SavedState(folder, "torch DCP", tensors, tuple(files))


def _open_file(folder: str, name: str, chunks: Sequence[tuple[SavedTensor, Chunk]], executor: Executor) -> PlannedFile:
    path, end = os.path.join(folder, name), max(chunk.place.start + chunk.place.nbytes for _, chunk in chunks)
    if not os.path.exists(path):
        raise CheckpointError(
            f"{path}: is missing, with {len(chunks)} chunks of weights; copy the files of all ranks to one folder"
        )
    with executor.sources.reading(path) as source:
        nbytes, version = source.nbytes, source.version
    if nbytes < end:
        raise TruncatedFileError(f"{path}: has {nbytes} bytes, {end} are expected, as {METADATA} says; copy it again")
    digest = fingerprint(f"{tensor.name} {chunk}" for tensor, chunk in chunks)
    return PlannedFile(path, nbytes, digest, version)


def shard_files(folder: str) -> list[str]:
    """Return the names of the safetensors files of a folder if they hold parts of tensors; else none."""
    return sorted(name for name in os.listdir(folder) if _SHARD.fullmatch(name))


def open_shards(folder: str, executor: Executor) -> SavedState:
    """Return what a folder of safetensors files holds of which each has the parts that one rank has saved.

    Raises:
        CheckpointError: parts are missing or overlap, or a file does not say where its parts belong.
    """
    tiles: dict[str, list[Tile]] = {}
    files, names = [], shard_files(folder)
    numbers = {int(match[1]) for match in map(_SHARD.fullmatch, names) if match}
    if missing := sorted(set(range(1, max(numbers) + 1)) - numbers):
        raise CheckpointError(f"{folder}: lacks the shards {listed(list(map(str, missing)))} of {max(numbers)} or more")
    for name in names:
        path = os.path.join(folder, name)
        with executor.sources.reading(path) as source:
            file = Safetensors().describe(source)
        files.append(PlannedFile(path, file.nbytes, file.digest, file.version))
        offsets = _offsets_in(path, (file.metadata or {}).get(SHARDING_INFO))
        for tensor in file.names:
            values = file.expression(tensor)
            first = offsets.get(tensor, {}).get(OFFSETS)
            if not isinstance(first, list) or len(first) != len(values.shape) or not all(map(_is_index, first)):
                raise CheckpointError(f"{path}: its header does not say where the part of {tensor} belongs ({OFFSETS})")
            tiles.setdefault(tensor, []).append(Tile(tuple(first), values))
    check_written_together(file.path for file in files)
    tensors: dict[tuple[str, ...], TiledTensor]
    tensors = {(name,): _assemble_parts(folder, name, parts) for name, parts in tiles.items()}
    return SavedState(folder, "torch DCP in safetensors files", tensors, tuple(files), has_shapes=False)


def _offsets_in(path: str, text: str | None) -> dict[str, dict[str, object]]:
    try:
        content = json.loads(text or "null")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {SHARDING_INFO} in its header is no JSON: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise CheckpointError(f"{path}: has no {SHARDING_INFO} in its header, as the files beside it have")
    return content


def _is_index(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def _assemble_parts(folder: str, name: str, parts: Sequence[Tile]) -> TiledTensor:
    # The files do not say the shape: the part that ends last does.
    dims = range(len(parts[0].offsets))
    if any(len(part.offsets) != len(dims) for part in parts):
        raise CheckpointError(f"{folder}: {name}: its parts have different numbers of dims")
    shape = tuple(max(part.offsets[dim] + part.values.shape[dim] for part in parts) for dim in dims)
    return assemble(f"{folder}: {name}", shape, parts)
