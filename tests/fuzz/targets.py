"""What is fuzzed: for each kind of untrusted input a function of its bytes. It raises `Finding` for what must not be.

Of any input must come a result or an error of lowmem_load: no other error, nothing opened, started or written besides
the input itself, and time and memory that the input bounds. Where somebody else reads the same format, both must agree.
"""

import atexit
import contextlib
import functools
import io
import json
import math
import os
import random
import shutil
import struct
import sys
import tempfile
import time
import traceback
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors
import torch
from torch._weights_only_unpickler import Unpickler

from lowmem_load.config.settings import read_settings
from lowmem_load.engines.zero3_target import Zero3
from lowmem_load.errors import CheckpointError, ConfigError, LowMemLoadError
from lowmem_load.files import inert_pickle
from lowmem_load.files.executor import Executor
from lowmem_load.files.index import base_of_adapter, check_index
from lowmem_load.files.safetensors import METADATA, PREFIX_NBYTES, Safetensors, parse_header
from lowmem_load.files.torch_zip import TorchObjects, TorchZip
from lowmem_load.planning.expression import Computed, Source, leaves, numel
from lowmem_load.training_checkpoints.dcp import read_metadata
from lowmem_load.training_checkpoints.plain_values import NeedsCodeError, PlainValues
from lowmem_load.training_checkpoints.rank_files import put_together
from lowmem_load.training_checkpoints.saved_state import Tile, assemble
from tests.fuzz.mutate import mutated

SECONDS, MAX_WAIT_S = 1.0, 10.0
"""That an input may take of a processor, and in all; most take a tenth of a millisecond."""

NBYTES_PER_BYTE, FREE_NBYTES = 64, 8 << 20
"""Memory that an input may take: 64 bytes for each of its own, beyond what any takes."""

MAX_NBYTES = 4096

CORPUS = Path(__file__).parent / "corpus"


class Finding(AssertionError):
    """What must not be."""


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of input, which `run` takes: it raises whatever the package raises, or `Finding`.

    `share` is that of the fresh inputs of a run in CI, by their time. Without `memory` its bound is not checked.
    """

    run: Callable[[bytes], object]
    kind: str
    words: Sequence[bytes]
    share: float = 1.0
    memory: bool = True


def fresh_inputs(name: str, seed: int, seconds: float) -> Iterator[bytes]:
    """Yield mutations of the corpus of a target until the time is over; the same ones for the same seed."""
    rng, target = random.Random(seed), TARGETS[name]
    corpus = [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield mutated(rng.choice(corpus), target.kind, target.words, corpus, rng)[:MAX_NBYTES]


def check(name: str, data: bytes) -> None:
    """Run a target on an input; an error of lowmem_load is as good as a result.

    Raises:
        Finding: anything else.
    """
    _warm_up(name)
    measured = TARGETS[name].memory and zlib.crc32(data) % 256 == 0  # always the same inputs, since measuring is slow
    if measured:
        tracemalloc.start()
    try:
        seconds = _run(name, data, time.monotonic)
        peak = tracemalloc.get_traced_memory()[1] if measured else 0
    finally:
        tracemalloc.stop()
    if peak > FREE_NBYTES + NBYTES_PER_BYTE * len(data):
        raise Finding(f"{name}: took {peak} bytes of memory for {len(data)}")
    if seconds > SECONDS:  # which may be the machine's doing
        cpu_seconds = _run(name, data, time.process_time)
        if cpu_seconds > SECONDS or seconds > MAX_WAIT_S:
            raise Finding(f"{name}: took {cpu_seconds:.1f} of {seconds:.1f} s")


def _run(name: str, data: bytes, clock: Callable[[], float]) -> float:
    """Return the seconds that an input takes."""
    start = clock()
    try:
        with _watched():
            TARGETS[name].run(data)
    except LowMemLoadError as error:
        if len(str(error)) > 4 * len(data) + 4096:
            raise Finding(f"{name}: a message of {len(str(error))} characters") from error
    except Finding:
        raise
    except Exception as error:
        raise Finding(f"{name}: {type(error).__name__}: {str(error)[:200]}") from error
    return clock() - start


@functools.cache
def _warm_up(name: str) -> None:
    """Let a target import what it needs, and make its folder."""
    with contextlib.suppress(LowMemLoadError):
        TARGETS[name].run(b"{}")


# -- what an input must not do ---------------------------------------------------------------------------------------

_FORBIDDEN = ("os.exec", "os.fork", "os.posix_spawn", "os.system", "subprocess.Popen", "socket.", "pickle.find_class")
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.")


class _Watch:
    """What the audit hook, which cannot be removed, goes by."""

    active = False
    installed = False
    allowed: tuple[str, ...] = ()
    seen: str | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _Watch.active:
        return
    if event == "open":
        path, mode, flags = arguments
        if isinstance(path, int) or str(path).startswith(_Watch.allowed):
            return
        reads = not (isinstance(mode, str) and set(mode) & set("wax+")) and not flags & (os.O_WRONLY | os.O_RDWR)
        if reads and str(path).startswith(
            (sys.prefix, sys.base_prefix, str(Path(__file__).parents[2]), "/proc/", "/sys/")
        ):
            return  # a module that is imported late, and what it asks of the machine
        _Watch.seen = f"opens {path!r}"
    elif event.startswith(_FORBIDDEN + _CHANGES) and "torchinductor_" not in str(arguments[0]):  # made by an import
        _Watch.seen = f"{event}{arguments!r:.200}"


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    if not _Watch.installed:
        sys.addaudithook(_audit)
        _Watch.installed = True
    # A module that is imported late would be compiled into a file.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    _Watch.active, _Watch.seen = True, None
    try:
        yield
    finally:
        _Watch.active, sys.dont_write_bytecode = False, before
        if _Watch.seen:
            raise Finding(_Watch.seen)


@functools.cache
def _folder() -> Path:
    """A folder that inputs are put into, with a link out of it, and one within."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "sub").mkdir()
    (folder / "out").symlink_to(folder.parent)
    (folder / "in").symlink_to(folder / "sub")
    _Watch.allowed = (str(folder),)
    return folder


def _as_file(data: bytes, name: str = "input.json") -> str:
    """Return the path of a file that holds `data`; its folder has no other."""
    before, _Watch.active = _Watch.active, False
    folder = _folder() / "input"
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(data)
    _Watch.active = before
    return str(path)


class Memory:
    """A `ByteSource` of bytes in memory."""

    path = version = "file"

    def __init__(self, data: bytes) -> None:
        self.data, self.nbytes = data, len(data)

    def read_into(self, offset: int, memory: memoryview) -> None:
        if memory.nbytes and not 0 <= offset <= self.nbytes - memory.nbytes:
            raise Finding(f"reads {memory.nbytes} bytes at {offset} of {self.nbytes}")
        memory[:] = self.data[offset : offset + memory.nbytes]

    def close(self) -> None:
        pass


def _check_inside(region: Any, source: Memory) -> None:
    if not isinstance(region, Source) or not 0 <= region.start <= source.nbytes - _nbytes(region):
        raise Finding(f"{region!r} lies outside of the file")


def _nbytes(region: Source) -> int:
    return math.prod(region.shape) * region.dtype.itemsize


# -- the targets -----------------------------------------------------------------------------------------------------


def safetensors_file(data: bytes) -> None:
    """A whole file; or, after a line with the number of zeros that follow it as data, a header alone.

    safetensors must come to the same, but for names that come twice and for odd values of fields that nobody reads.
    """
    size, newline, header = data.partition(b"\n")
    if newline and size.isdigit() and len(size) <= 5:
        data = struct.pack("<Q", len(header)) + header + bytes(int(size))
    try:
        theirs: Any = {name: (found["dtype"], list(found["shape"])) for name, found in safetensors.deserialize(data)}
    except safetensors.SafetensorError as error:
        theirs = error
    source = Memory(data)
    try:
        found = Safetensors().describe(source)
    except CheckpointError as error:
        if not isinstance(theirs, Exception) and not _has_twins(data):
            raise Finding(f"safetensors takes {theirs!r:.200}, and we do not: {error}") from error
        raise
    if isinstance(theirs, Exception):
        theirs = _without_ignored(data, theirs)
    if set(theirs) != set(found.names):
        raise Finding(f"safetensors finds {sorted(theirs)!r:.200}, we find {sorted(found.names)!r:.200}")
    for name in found.names:
        expression = found.expression(name)
        _check_inside(expression, source)


def _without_ignored(data: bytes, refusal: Exception) -> dict[str, Any]:
    """Return what safetensors finds in a file once its header has nothing but what we read."""
    (nbytes,) = struct.unpack_from("<Q", data)
    tensors, metadata = parse_header(data[PREFIX_NBYTES : PREFIX_NBYTES + nbytes], "x", len(data))
    start = PREFIX_NBYTES + nbytes
    header: dict[str, Any] = {} if metadata is None else {METADATA: metadata}
    for name, entry in tensors.items():
        offsets = [entry.start - start, entry.end - start]
        header[name] = {"dtype": entry.code, "shape": entry.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    try:
        found = safetensors.deserialize(struct.pack("<Q", len(text)) + text + data[start:])
    except safetensors.SafetensorError:
        raise Finding(f"we take {list(tensors)!r:.200}, and safetensors does not: {refusal}") from None
    return {name: tensor["dtype"] for name, tensor in found}


def _has_twins(data: bytes) -> bool:
    """Return whether a name, or a string of the metadata, comes twice in a header that safetensors takes."""
    found = []

    def pairs(items: list[tuple[str, Any]]) -> None:
        found.append(len(items) != len({name for name, _ in items}))

    json.loads(data[PREFIX_NBYTES : PREFIX_NBYTES + struct.unpack_from("<Q", data)[0]], object_pairs_hook=pairs)
    return any(found)


def index(data: bytes) -> None:
    """An index file. What it may name lies in the folder, or behind a link that the user has put there."""
    path, folder = _as_file(data), str(_folder())
    check_index(path)
    for file in json.loads(data)["weight_map"].values():
        target = os.path.normpath(os.path.join(folder, file))
        if target != folder and not target.startswith(folder + os.sep):
            raise Finding(f"{file!r} is {target}, outside of the folder")


def torch_zip(data: bytes) -> None:
    """A `pytorch_model.bin`."""
    source = Memory(data)
    found = TorchZip().describe(source)
    for name in found.names:
        for leaf in leaves(found.expression(name)):
            if isinstance(leaf, Computed) and numel(leaf) * leaf.dtype.itemsize > len(data):
                raise Finding(f"{name!r:.80} is computed as {numel(leaf)} elements, more than the file has")
            for region in leaf.parts if isinstance(leaf, Computed) else (leaf,):
                _check_inside(region, source)


def objects(data: bytes) -> None:
    """The `data.pkl` of a checkpoint of training."""
    inert_pickle.objects(data, "x.pt")


def client_state(data: bytes) -> None:
    """The `data.pkl` of model states, all of it a client's. Its tensors lie in three floats of a file."""
    tree = inert_pickle.objects(data, "x.pt")
    storages = {str(key): SimpleNamespace(start=0, nbytes=12) for key in range(3)}
    file = TorchObjects("x.pt", len(data), "", "", tree, storages)
    with Executor(open_source=lambda _path: Memory(bytes(12))) as executor:
        try:
            values = [PlainValues(file, executor).value(tree)]
        except NeedsCodeError:
            return
    seen: set[int] = set()
    for value in values:  # which grows
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            values += value
        elif type(value).__module__ not in ("builtins", "numpy", "numpy.dtypes", "torch", "torch.nn.parameter"):
            raise Finding(f"{type(value)} was made")


def dcp_metadata(data: bytes) -> None:
    """The `.metadata` of a torch DCP checkpoint, with chunks that lie where it says."""
    for tensor in read_metadata("file", data).values():
        tiles = [
            Tile(chunk.offsets, Source(chunk.file, tensor.name, chunk.start, chunk.sizes, tensor.dtype))
            for chunk in tensor.chunks
        ]
        whole = assemble(tensor.name, tensor.shape, tiles)
        chunks = [leaf for leaf in leaves(whole.whole) if isinstance(leaf, Source)]
        if whole.numel != sum(map(numel, chunks)):
            raise Finding(f"{tensor.name!r:.80}: {whole.numel} elements in other chunks")


def rank_file(data: bytes) -> None:
    """The `data.pkl` of one rank's file, of two ranks that saved alike."""
    tree = inert_pickle.objects(data, "x.pt")
    files = [TorchObjects(f"{rank}.pt", len(data), "", "", tree, {}) for rank in range(2)]
    with Executor() as executor:
        put_together("folder", files, executor)


def pickled(data: bytes) -> None:
    """The `data.pkl` in a `pytorch_model.bin`. What we take, torch's weights-only loader finds the same tensors in."""
    found = TorchZip().read(data, "x.bin")
    unpickler = Unpickler(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = _meta_storage
    with warnings.catch_warnings(action="ignore"):
        try:
            theirs = unpickler.load()
        except Exception as error:
            if any(frame.name == "_set_obj_state" for frame in traceback.extract_tb(error.__traceback__)):
                return  # attributes of a parameter, which we leave out
            if "Unsupported operand" in str(error) or "protocol" in str(error):
                return  # opcodes of newer protocols
            raise Finding(f"we take {found!r:.200}, torch does not: {type(error).__name__}: {error}") from error
    for name, tensor in found.items():
        if name not in theirs or not isinstance(theirs[name], torch.Tensor):
            raise Finding(f"{name!r} is no tensor for torch")
        ours = (tensor.dtype, tensor.offset, tensor.size, tensor.strides)
        other = theirs[name]
        if ours != (other.dtype, other.storage_offset(), tuple(other.shape), other.stride()):
            raise Finding(f"{name!r} is {other.shape} {other.dtype} for torch, {ours} for us")


def _meta_storage(key: Any) -> Any:
    _, kind, _, _, numel = key
    dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
    nbytes = numel * dtype.itemsize
    untyped = torch.UntypedStorage(nbytes, device="meta")
    return torch.storage.TypedStorage(wrap_storage=untyped, dtype=dtype, _internal=True)


_WEIGHT = torch.empty(3, 5, device="meta")
_MODEL_CONFIG = SimpleNamespace(hidden_size=8)


def ds_config(data: bytes) -> None:
    """A ds_config file, as a load reads it."""
    path = _as_file(data)
    for is_active in (False, True):
        try:
            settings = read_settings(path, world_size=4, is_active=is_active).for_model(_MODEL_CONFIG)
        except ConfigError:
            continue
        for value in (settings.dtype, settings.offload_device, settings.secondary_size, str(settings.compared)):
            hash(value)
        if settings.stage == 3:
            target = Zero3(settings, 1, torch.device("cpu"))
            target.layout("weight", _WEIGHT)


def model_config(data: bytes) -> None:
    """A config.json, and which class it asks for."""
    from lowmem_load.models.model_class import model_class
    from lowmem_load.models.model_class import model_config as read

    folder = os.path.dirname(_as_file(data, "config.json"))
    model_class(None, read(folder, {}), trust_remote_code=False)


def adapter(data: bytes) -> None:
    """An adapter_config.json."""
    base_of_adapter(_as_file(data))


_JSON = (b"null", b"true", b"1e999", b"-1", b"-0", b"[]", b"{}", b'""', b"\\u0000", b"\\ud800", b"NaN", b"9" * 20)
_ZERO_KEYS = (
    *("zero_optimization", "stage", "offload_param", "offload_optimizer", "device", "nvme_path", "buffer_count"),
    *("buffer_size", "max_in_cpu", "pin_memory", "zero_hpz_partition_size", "mics_shard_size", "aio", "optimizer"),
    *("scheduler", "weight_quantization", "quantized_initialization", "data_types", "keep_in_fp32_modules", "bf16"),
    *("fp16", "bfloat16", "enabled", "auto", "nvme", "cpu", "none", "sequence_parallel_size", "train_batch_size"),
    *("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "reduce_bucket_size"),
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "zero_quantized_weights"),
)
_CONFIG_KEYS = (
    *("model_type", "llama", "bert", "qwen3_moe", "t5", "clip", "architectures", "LlamaForCausalLM", "hidden_size"),
    *("num_hidden_layers", "vocab_size", "dtype", "torch_dtype", "auto_map", "quantization_config", "text_config"),
    *("vision_config", "rope_parameters", "layer_types", "num_attention_heads", "num_experts", "id2label"),
)


def _quoted(words: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(json.dumps(word).encode() for word in words)


_GLOBALS = (
    *inert_pickle.STORAGE_DTYPES,
    *inert_pickle.DTYPES,
    *("collections.OrderedDict", "torch.Size", "torch.device", "torch._utils._rebuild_tensor_v2", "os.system"),
    *("torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_parameter", "builtins.eval"),
    "torch._utils._rebuild_parameter_with_state",
)
_PICKLE = (
    *("c{}\n{}\n".format(*name.rsplit(".", 1)).encode() for name in _GLOBALS),
    *(b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x03tQ", b"\x80\x02"),
    *(b"K\x00K\x01\x85K\x01\x85", b"\x89ccollections\nOrderedDict\n)RtR", b"X\x01\x00\x00\x00a", b"\x8a\x09"),
    *(b"\x8b\xff\xff\xff\x7f", b"r\xff\xff\xff\xff", b"h\x00", b"q\x00", b"(", b"t", b"R", b"}", b"]", b")", b"b"),
)

_OBJECTS = (
    *(b"c_codecs\nencode\n", b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\nscalar\n", b"X\x06\x00\x00\x00latin1"),
    *(b"c__builtin__\nset\n", b"ccollections\nCounter\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"\x81"),
    *(b"ctorch._tensor\n_rebuild_from_type_v2\n", b"X\x02\x00\x00\x00f8", b"X\x01\x00\x00\x00<"),
)

_OF_CLIENTS = (
    *(b"cbuiltins\nset\n", b"cbuiltins\nbytearray\n", b"cbuiltins\ncomplex\n"),
    *(b"ctorch\ndevice\n", b"cnumpy\nndarray\n"),
    *(b"(K\x03X\x01\x00\x00\x00<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb", b"X\x04\x00\x00\x00cuda"),
)

_OF_DCP = (
    *(b"\x8c\x05model", b"\x94", b"\x93", b"\x95\x10\x00\x00\x00\x00\x00\x00\x00"),
    *(b"\x81", b"\x85", b"\x86", b"\x8c\x00"),
    *(b"ctorch.distributed.tensor.placement_types\nShard\n", b"ctorch.distributed.tensor.placement_types\nReplicate\n"),
    *(b"ctorch._utils\n_rebuild_wrapper_subclass\n", b"X\x0d\x00\x00\x00_local_tensor", b"X\x05\x00\x00\x00_spec"),
)

TARGETS: dict[str, Target] = {
    "safetensors": Target(
        safetensors_file,
        "json",
        (*_JSON, *_quoted(("dtype", "shape", "data_offsets", "__metadata__", "F32", "F4", "F6_E2M3", "BOOL"))),
        share=2.0,
    ),
    "index": Target(index, "json", (*_JSON, *_quoted(("weight_map", "metadata", "..", "/", "../x", "out/x", "in/x")))),
    "torch_zip": Target(
        torch_zip, "bytes", (*_PICKLE, b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06"), 2.0
    ),
    "pickle": Target(pickled, "pickle", _PICKLE, 2.0),
    "objects": Target(objects, "pickle", (*_PICKLE, *_OBJECTS), 0.5),
    "client_state": Target(client_state, "pickle", (*_PICKLE, *_OBJECTS, *_OF_CLIENTS)),
    "dcp_metadata": Target(dcp_metadata, "pickle", (*_PICKLE, *_OBJECTS, *_OF_DCP)),
    "rank_file": Target(rank_file, "pickle", (*_PICKLE, *_OBJECTS, *_OF_DCP)),
    "ds_config": Target(ds_config, "json", (*_JSON, *_quoted(_ZERO_KEYS)), 2.0),
    "model_config": Target(model_config, "json", (*_JSON, *_quoted(_CONFIG_KEYS)), 2.0, memory=False),
    "adapter": Target(adapter, "json", (*_JSON, *_quoted(("base_model_name_or_path",))), 0.5),
}
