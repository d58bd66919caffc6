"""`push_weights` to functions and clients; TRL's own sync under `install`, to a receiver that speaks its protocol."""

import asyncio
import gc
import importlib
import os
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from json import loads
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lowmem_load
from lowmem_load import WeightSource, iter_weights, load_model, push_weights, save_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import ConfigError, RankError, UnsupportedError
from lowmem_load.integrations.install import streaming
from lowmem_load.weights_out.iter_weights import hand_over
from tests import builders
from tests.model_digest import model_digest
from tests.multi_rank.test_iter_weights import COLLECTIVES
from tests.multi_rank.test_load_into import filled, meshes
from tests.multi_rank.test_save import FP32, adapted, counted
from tests.parity import assert_equal
from tests.ranks import run_ranks


class Taker:
    """A client with the method of TRL's."""

    def __init__(
        self, fails_after: int | None = None, takes: int | None = None, *, fails_at_the_end: bool = False
    ) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self.fails_after, self.takes, self.num_resets = fails_after, takes, 0
        self.fails_at_the_end = fails_at_the_end

    def update_named_params(self, metadata: list[Any], named_params: Iterator[Any]) -> None:
        """Take all, or some."""
        if self.fails_after == 0:
            raise ConnectionError("the server is gone")
        if self.takes == 0:
            return
        for (name, dtype, shape), (given, tensor) in zip(metadata, named_params, strict=self.takes is None):
            assert (name, dtype, shape) == (given, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            self.found[name] = tensor
            if len(self.found) == self.fails_after:
                raise ConnectionError("the server is gone")
            if len(self.found) == self.takes:
                return
        if self.fails_at_the_end:
            raise ConnectionError("the server says 500")

    def reset_prefix_cache(self) -> None:
        """Count."""
        self.num_resets += 1


class Raises(Taker):
    """A client that raises what has a meaning of its own to generators or to asyncio."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def update_named_params(self, metadata: list[Any], named_params: Iterator[Any]) -> None:
        """Take one, and raise."""
        next(named_params)
        raise self.error


class Swallows(Taker):
    """A client that raises errors of the weights as its own, or says nothing of them."""

    def __init__(self, error: type[Exception] | None) -> None:
        super().__init__()
        self.error = error

    def update_named_params(self, metadata: list[Any], named_params: Iterator[Any]) -> None:
        """Take all that come."""
        try:
            super().update_named_params(metadata, named_params)
        except RankError:
            if self.error is not None:
                raise self.error("no weights") from None


class OneByOne(Taker):
    """A client of an older TRL."""

    update_named_params = None  # type: ignore[assignment]

    def update_named_param(self, name: str, weights: torch.Tensor) -> None:
        """Take one."""
        self.found[name] = weights


class OfSglang:
    """A client with the methods of SGLang's engine."""

    def __init__(self, says: tuple[bool, str] = (True, "Success")) -> None:
        self.found: dict[str, torch.Tensor] = {}
        self.says, self.num_resets = says, 0

    def update_weights_from_tensor(self, named_tensors: Any, load_format: Any = None, flush_cache: bool = True) -> Any:
        """Take a bucket."""
        assert not flush_cache and isinstance(named_tensors, list)
        self.found.update(named_tensors)
        return self.says

    def flush_cache(self) -> Any:
        """Count."""
        self.num_resets += 1
        return SimpleNamespace(success=self.num_resets == 1)


class Late:
    """A client whose work begins when somebody awaits it; `name` is the method, "" the call itself."""

    def __init__(self, name: str) -> None:
        setattr(self, name or "function", self.coroutine)

    async def coroutine(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def __call__(self, *args: Any) -> Any:
        """Return what the function does, if it is to be called."""
        return self.function(*args) if hasattr(self, "function") else None


def iter_weights_of(model: Any, bucket_bytes: int) -> list[tuple[str, torch.Tensor]]:
    return [pair for bucket in iter_weights(model, bucket_bytes=bucket_bytes) for pair in bucket]


def push_all(path: str) -> None:
    rank = DistributedInterface().rank
    model = load_model(path, FP32)
    wanted = dict(pair for bucket in iter_weights(model) for pair in bucket)
    some = sum(value.nbytes for value in wanted.values()) // 4
    for takers in ((0, 1, 2), (1,), (0, 2)):
        found: dict[str, torch.Tensor] = {}
        push_weights(model, found.update if rank in takers else None, bucket_bytes=some)
        assert_equal(found, wanted if rank in takers else {}, takers)
    for kind in (Taker, OneByOne, OfSglang):
        client: Any = kind()
        push_weights(model, client if rank == 2 else None, bucket_bytes=some)
        assert_equal(client.found, wanted if rank == 2 else {}, kind)
        assert client.num_resets == (rank == 2)
    bad = {"the server is gone": (0, None), "server is gone": (5, None), "did not take all of the weights": (None, 3)}
    for match, (fails_after, takes) in bad.items():
        client = Taker(fails_after, takes)
        with pytest.raises(RankError, match=rf"sending the weights .*\n.*rank 1: .*{match}") as caught:
            push_weights(model, client if rank == 1 else None, bucket_bytes=some)
        assert (caught.value.__cause__ is not None) == (rank == 1)
        assert not client.num_resets
    for takes in (0, 1, len(wanted) - 1):
        for in_buckets in ({}, {"bucket_bytes": some}):
            with pytest.raises(RankError, match=r"rank 1: .*did not take all of the weights"):
                push_weights(model, Taker(takes=takes) if rank == 1 else None, **in_buckets)
    push_weights(model, Taker(takes=len(wanted)) if rank == 1 else None)  # it does not ask for more
    client = Taker(fails_at_the_end=True)
    with pytest.raises(RankError, match=r"handing out the weights failed .*\n.*rank 1: .*the server says 500"):
        push_weights(model, client if rank == 1 else None, bucket_bytes=some)
    for error in (ValueError, None):
        clients = {1: Taker(fails_after=5), 2: Swallows(error)}
        with pytest.raises(RankError, match=r"rank 1: .*server is gone"):
            push_weights(model, clients.get(rank), bucket_bytes=some)
    with pytest.raises(RankError, match=r"rank 2: .*update_weights_from_tensor says: no such name"):
        push_weights(model, OfSglang((False, "no such name")) if rank == 2 else None, bucket_bytes=some)
    for late in ((_ for _ in ()), Future[None]()):
        with pytest.raises(RankError, match=r"rank 2: .*a call returned a (generator|Future), which nothing awaits"):
            push_weights(model, (lambda _, late=late: late) if rank == 2 else None, bucket_bytes=some)
    for method in ("update_named_params", "update_named_param", "update_weights_from_tensor", "", "flush_cache"):
        with pytest.raises(RankError, match=r"rank 2: .*a call returned a coroutine, which nothing awaits"):
            push_weights(model, Late(method) if rank == 2 else None, bucket_bytes=some)
    busy = OfSglang()
    busy.num_resets = 1
    with pytest.raises(RankError, match=r"resetting the cache failed .*\n.*rank 2: .*flush_cache failed"):
        push_weights(model, busy if rank == 2 else None, bucket_bytes=some)
    for error in (StopIteration, GeneratorExit, asyncio.CancelledError):
        expected = RankError if rank != 1 or error is not asyncio.CancelledError else error
        began_s = time.monotonic()
        with pytest.raises(expected, match=error.__name__ if expected is RankError else None):
            push_weights(model, Raises(error) if rank == 1 else None, bucket_bytes=some)
        assert time.monotonic() - began_s < 10, "no rank waits for the others"
    for to in ("all", 1):
        source = WeightSource(model, bucket_bytes=some, dst=to)
        for _ in range(2):
            expected = [(name, value.dtype, tuple(value.shape)) for name, value in iter_weights_of(model, some)]
            for metadata in (source.metadata(), source.metadata):  # of vLLM 0.28 to 0.32, and of 0.33
                assert [(one.name, one.dtype, one.shape) for one in metadata] == expected
                assert all(one.owners is one.mesh_shape is one.placements is None for one in metadata)
            assert source.owned_names(1) == [name for name, *_ in expected]
            assert source.implements_iter_full() and not source.implements_iter_local()
            for pairs in (source, source.iter_full()):
                assert_equal(dict(pairs), wanted if to in ("all", rank) else {}, to)
    with pytest.raises(ConfigError, match="WeightSource: changed_only"):
        WeightSource(model, changed_only=True)
    with pytest.raises(ConfigError, match="no rank has one"):
        push_weights(model, None)
    with pytest.raises(RankError, match=r"rank 0: ConfigError: push_weights: client: a object is not a function"):
        push_weights(model, object() if rank == 0 else None)
    began_s = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0: TypeError: .*bucket_byte"):
        push_weights(model, print, **({} if rank else {"bucket_byte": 1}))
    assert time.monotonic() - began_s < 10, "no rank waits for rank 0"
    push_weights(model, (final := Taker()), bucket_bytes=1)
    assert_equal(final.found, wanted, "at the end")


def transfer(source: WeightSource, rank: int) -> dict[str, torch.Tensor]:
    """What a worker gets from vLLM 0.33's engine for trainers by NCCL, with gloo in its place (`nccl_engine.py`)."""
    told = source.metadata
    assert source.implements_iter_full() and all(one.owners is None or one.owners[0] == 0 for one in told)
    if rank:
        assert not [*source.iter_full()], "only the sender's are used"
        return {}
    store, found = torch.distributed.HashStore(), dict[str, torch.Tensor]()

    def receive() -> None:
        group = torch.distributed.ProcessGroupGloo(store, 1, 2)
        for name, dtype, shape, *_ in told:
            group.broadcast(found.setdefault(name, torch.empty(shape, dtype=dtype)), 0).wait()

    worker = threading.Thread(target=receive)
    worker.start()
    group = torch.distributed.ProcessGroupGloo(store, 0, 2)
    for (name, dtype, shape, *_), (given, tensor) in zip(told, source.iter_full(), strict=True):
        assert (name, dtype, shape) == (given, tensor.dtype, tuple(tensor.shape))
        group.broadcast(tensor.contiguous(), 0).wait()
    worker.join()
    return found


def share(source: WeightSource, rank: int) -> dict[str, torch.Tensor]:
    """What rank 0 opens of the memory that the last rank shares, as vLLM 0.33's engine by IPC (`ipc_engine.py`)."""
    assert source.owned_names(rank) == [one.name for one in source.metadata]
    kept, handles = [], []
    for name, tensor in source.iter_full():
        kept.append(tensor.contiguous())
        handles.append((name, kept[-1].untyped_storage()._share_filename_cpu_()))
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, handles)
    found = {}
    for (name, handle), one in zip(gathered[-1], source.metadata, strict=True):
        memory = torch.UntypedStorage._new_shared_filename_cpu(*handle)
        found[name] = torch.empty(0, dtype=one.dtype).set_(memory).view(one.shape).clone()
    torch.distributed.barrier()
    return found


def yield_parts(paths: dict[str, str], out: str) -> None:
    """Rank function: parts are chunks of what `save_model` writes, by the placements; others are refused by name."""
    rank, world_size = DistributedInterface().rank, torch.distributed.get_world_size()
    models: list[tuple[str, Any, dict[str, Any], str]] = []
    for name, shard in meshes(world_size).items():
        refused = r"weight: is not a parameter that FSDP2 cuts" if name in ("tp x fsdp", "flattened") else ""
        models.append((name, filled(paths["llama"], shard), {}, refused))
        models.append((f"{name} in bf16", filled(paths["llama"], shard), {"dtype": torch.bfloat16}, refused))
    shard = next(iter(meshes(world_size).values()))
    models.append(("experts", filled(paths["mixtral"], shard), {}, r"experts\.0.*: is not a parameter .* converted"))
    buffers = filled(paths["llama"], shard)
    buffers.model.norm.register_buffer("scales", torch.full((3,), rank + 1.0))  # the ranks differ
    models.append(("buffers", buffers, {}, r"norm\.scales: is not a parameter .* replicated"))
    if world_size == 2:  # of an uneven shard of HSDP, PEFT makes other adapters on each rank
        lora = adapted("odd", filled(paths["llama"], shard))
        models.append(("merged", lora, {"merge_adapters": True}, "weight: is not a parameter .* merged"))
    models.append(("ZeRO-3", load_model(paths["llama"], FP32), {}, "weight: is not .* by ZeRO-3, .*use iter_full"))
    for name, model, options, match in models:
        save_model(model, f"{out}/{name}", **options)
        wanted = load_file(f"{out}/{name}/model.safetensors")
        for way in (transfer, share):
            found = way(WeightSource(model, dst=0 if way is transfer else "all", **options), rank)
            assert_equal(found, {} if way is transfer and rank else wanted, (name, way))
        source = WeightSource(model, dst=0, **options)
        if match:
            assert not source.implements_iter_local()
            with pytest.raises(UnsupportedError, match=match):
                next(source.iter_local())
            assert not all(one.owners for one in source.metadata)
            continue
        assert source.implements_iter_local()
        with counted(COLLECTIVES) as collectives:
            parts = [*source.iter_local()]
        assert not collectives
        assert [given for given, _ in parts] == [one.name for one in source.metadata]
        for (given, part), one in zip(parts, source.metadata, strict=True):
            chunk = wanted[given]
            assert one.owners == tuple(range(world_size)) and len(one.mesh_shape) == len(one.placements)
            places = torch.arange(world_size).view(one.mesh_shape).eq(rank).nonzero()[0].tolist()
            for place, size, placement in zip(places, one.mesh_shape, one.placements, strict=True):
                if placement.is_shard():
                    chunks = chunk.chunk(size, placement.dim)
                    chunk = chunks[place] if place < len(chunks) else chunk.narrow(placement.dim, 0, 0)
            assert_equal({given: part}, {given: chunk}, (name, given))
        changing = source.iter_local()
        next(changing)
        with torch.no_grad():
            model.lm_head.weight.mul_(1)
        with pytest.raises(ConfigError, match="iter_local: weights were changed"):
            list(changing)
        early = source.iter_local()
        next(early)
        if rank:
            early.close()
        else:
            with pytest.raises(RankError, match=r"rank [1-3]: .*its loop over iter_local ended"):
                list(early)
        model.added = torch.nn.Linear(2, 2)
        with pytest.raises(ConfigError, match="other tensors than the metadata"):
            next(source.iter_local())


@pytest.mark.parametrize("world_size", [2, 4])
def test_sources_serve_the_engines_of_vllm(world_size: int, checkpoints: Path, tmp_path: Path) -> None:
    paths = {
        "llama": str(builders.tiny_llama(checkpoints, torch.float32, **builders.ODD_SIZES)),
        "mixtral": str(builders.tiny_mixtral(checkpoints, torch.float32)),
    }
    run_ranks(yield_parts, paths, str(tmp_path), world_size=world_size, timeout_s=200)


def models_with_adapters(path: str) -> Iterator[tuple[str, Any]]:
    """Yield a whole model, and sharded ones. Each has a second adapter."""
    from peft import LoraConfig

    def with_adapters(model: Any) -> Any:
        model.name_or_path = path
        model = adapted("odd", model)
        model.add_adapter("other", LoraConfig(target_modules=["v_proj"], r=2, init_lora_weights=False))
        return model

    yield "whole", with_adapters(AutoModelForCausalLM.from_pretrained(path))
    with streaming(FP32):
        model = with_adapters(load_model(path, FP32))
    yield "ZeRO-3", model
    shard = next(iter(meshes(2).values()))
    yield "FSDP2", with_adapters(filled(path, shard))
    model = with_adapters(AutoModelForCausalLM.from_pretrained(path))
    shard(model)  # the adapters, too
    yield "FSDP2 of all", model


def save_adapters(path: str, out: str) -> None:
    """Rank function: what engines can load is what PEFT saves of the whole model."""
    folder_of_rank = f"{out}/{DistributedInterface().rank}"
    for way, model in models_with_adapters(path):
        if way == "whole":
            model.save_pretrained(folder_of_rank)
        for name, folder in (("default", Path(folder_of_rank)), ("other", Path(folder_of_rank, "other"))):
            save_model(model, f"{out}/{way}", selected_adapters=[name])
            made = Path(out, way) if name == "default" else Path(out, way, name)
            tensors = [load_file(each / "adapter_model.safetensors") for each in (made, folder)]
            assert_equal(*tensors, (way, name))
            configs = [loads((each / "adapter_config.json").read_text()) for each in (made, folder)]
            assert configs[0] == configs[1], (way, name)


def test_adapters_alone_are_what_peft_saves(checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32, **builders.ODD_SIZES)
    run_ranks(save_adapters, str(path), str(tmp_path), timeout_s=250)


def test_clients_get_all_weights_or_all_ranks_raise(checkpoints: Path) -> None:
    path = builders.tiny_mixtral(checkpoints, torch.float32)
    run_ranks(push_all, str(path), world_size=3, timeout_s=200)


def test_clients_keep_nothing_while_the_next_bucket_is_made() -> None:
    tensors: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def buckets() -> Iterator[Any]:
        for _ in range(3):
            bucket = [("a", torch.zeros(1)), ("b", torch.zeros(1))]
            tensors.extend(weakref.ref(tensor) for _, tensor in bucket)
            yield bucket
            bucket.clear()
            alive.append(sum(tensor() is not None for tensor in tensors))

    sending: Any = SimpleNamespace(changed_only=False)
    hand_over(SimpleNamespace(update_named_param=lambda name, tensor: None), sending, buckets())
    assert alive == [0, 0, 0]


class Server:
    """Stands for the requests of TRL's client, and for the vLLM server that answers them."""

    data: ClassVar[queue.Queue[bytes]] = queue.Queue()
    calls: ClassVar[list[str]] = []
    weights: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self, *, is_gone: bool) -> None:
        self.is_gone = is_gone

    def post(self, url: str, json: Any = None) -> Any:
        """Answer one request. The values come through `data`."""
        if self.is_gone:
            raise ConnectionError("refused")
        self.calls.append(url.removeprefix("http://server"))
        if url.endswith("/update_weights"):
            info = json["update_info"]
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
                values = torch.frombuffer(bytearray(self.data.get(timeout=20)), dtype=getattr(torch, dtype))
                self.weights[name] = values.view(shape)
        return SimpleNamespace(status_code=200, text="{}", json=dict)


class Engine:
    """Stands for the part of vLLM in the trainer, which sends values by NCCL: here to the server of this process."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: Any) -> None:
        """Send."""
        assert trainer_args.packed
        for _, tensor in iterator:
            Server.data.put(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


def generation_of(
    model: Any, rank: int, mode: str = "server", zero_stage: int = 3, fsdp: int = 0, *, is_gone: bool = False
) -> Any:
    """TRL's generation, without vLLM, and with TRL's client."""
    from trl.generation import vllm_client, vllm_generation

    vllm_client.NCCLWeightTransferEngine, vllm_client.NCCLTrainerSendWeightsArgs = Engine, SimpleNamespace
    client = object.__new__(vllm_client.VLLMClient)  # its __init__ needs vLLM
    vars(client).update(
        session=Server(is_gone=is_gone), base_url="http://server", communicator=None, _updating_weights=False
    )
    plugins = {"deepspeed_plugin": SimpleNamespace(zero_stage=zero_stage) if zero_stage else None}
    plugins["fsdp_plugin"] = SimpleNamespace(fsdp_version=fsdp) if fsdp else None
    accelerator = SimpleNamespace(
        is_main_process=rank == 0, state=SimpleNamespace(**plugins), device=torch.device("cpu")
    )
    vllm_generation.VLLMGeneration._init_vllm = lambda self: None
    generation = vllm_generation.VLLMGeneration(model, accelerator, None, mode=mode)
    generation.vllm_client = client if rank == 0 else None
    return generation


def sync_as_trl(paths: dict[str, str]) -> None:
    """Rank function: TRL's sync under `install` sends what it sends by itself, without GatheredParameters."""
    rank = DistributedInterface().rank

    def sent(send: Any) -> tuple[dict[str, torch.Tensor], int]:
        Server.weights, Server.calls[:] = {}, []
        with counted(COLLECTIVES) as collectives:
            send()
        calls = ["/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
        assert list(dict.fromkeys(Server.calls)) == (calls if rank == 0 else [])
        return Server.weights, len(collectives)

    def loaded(name: str) -> Any:
        if name == "sharded":
            return filled(paths["llama"], next(iter(meshes(2).values())))
        with streaming(FP32):
            model = load_model(paths[name.split(maxsplit=1)[0]], FP32)
            return adapted("odd", model) if "lora" in name else model

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("gathers")

    default_gather = deepspeed.zero.GatheredParameters
    for name in ("llama", "tied", "llama lora", "sharded"):
        kind = {"zero_stage": 0, "fsdp": 2} if name == "sharded" else {}
        wanted, _ = sent(generation_of(loaded(name), rank, **kind).sync_weights)
        lowmem_load.install()
        model = loaded(name)
        deepspeed.zero.GatheredParameters = refuse
        generation = generation_of(model, rank, **kind)
        found, num_collectives = sent(generation.sync_weights)
        assert num_collectives <= 2, name  # one for what is partitioned, one for what is not
        assert_equal(found, wanted, name)
        assert len(Server.calls) == 4 * (rank == 0)
        pairs: dict[str, torch.Tensor] = {}
        colocated = generation_of(model, rank, "colocate", **kind)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=pairs.update))
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        colocated.llm = SimpleNamespace(
            llm_engine=SimpleNamespace(model_executor=worker), reset_prefix_cache=lambda: None
        )
        colocated.sync_weights()
        if rank == 0:
            assert_equal(pairs, wanted, (name, "colocate"))
        assert len(pairs) > 20
        broken = generation_of(model, rank, is_gone=True, **kind)
        with pytest.raises(RankError, match="rank 0: ConnectionError: refused"):
            broken.sync_weights()
        hasty = generation_of(model, rank, **kind)
        hasty.vllm_client = Taker(takes=3)
        with pytest.raises(RankError, match=r"rank 0: .*did not take all of the weights"):
            hasty.sync_weights()
        deepspeed.zero.GatheredParameters = default_gather
        from lowmem_load.integrations.install import uninstall

        uninstall()
        del model
        gc.collect()


class AsyncServer:
    """Stands for the HTTP side of a server, which gets as many tensors as it was told of while the trainer sends."""

    def __init__(self, *, is_gone: bool = False) -> None:
        self.server, self.is_gone, self.calls = Server(is_gone=False), is_gone, list[str]()

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.append(name)

    def load_lora_adapter(self, name: str, path: str) -> None:
        """Take an adapter."""
        self.calls.append("load_lora_adapter")
        if self.is_gone:
            raise ConnectionError("refused")

    def update_weights(self, update_info: Any, timeout: float) -> None:
        """Take them."""
        self.calls.append("update_weights")
        if self.is_gone:
            raise ConnectionError("refused")
        self.server.post("/update_weights", {"update_info": update_info})


def async_trainer(module: str, name: str, model: Any, server: AsyncServer) -> Any:
    """One of TRL's asynchronous trainers, without vLLM, rollouts and data, but with TRL's client."""
    of_client = importlib.import_module(f"{module}.weight_transfer")
    of_client.NCCLWeightTransferEngine, of_client.NCCLTrainerSendWeightsArgs = Engine, SimpleNamespace  # type: ignore[attr-defined]
    cls = getattr(importlib.import_module(f"{module}.{module.rpartition('.')[2]}_trainer"), name)
    trainer, rank = object.__new__(cls), torch.distributed.get_rank()
    client = object.__new__(of_client.WeightTransferClient)  # its __init__ needs vLLM
    told = {"names": ["of init"], "dtype_names": ["float32"], "shapes": [[0]], "packed": True}
    vars(client).update(vllm=server, weight_sync_timeout=20, _weight_update_info=told, model_update_group=object())
    accelerator = SimpleNamespace(
        is_main_process=rank == 0,
        unwrap_model=lambda model: model,
        wait_for_everyone=torch.distributed.barrier,
        device=torch.device("cpu"),
    )
    vars(trainer).update(
        model=model, accelerator=accelerator, weight_transfer=client if rank == 0 else None, _lora_sync=False
    )
    vars(trainer).update(model_version=0, rollout_worker=None, _metrics={"train": defaultdict(list)})
    return trainer


ASYNC = {"async_grpo": "AsyncGRPOTrainer", "async_distillation": "AsyncDistillationTrainer"}


def sync_asynchronously(paths: dict[str, str]) -> None:
    """Rank function: AsyncGRPO's sync under `install` sends what `save_model` writes, and its model stays as it is."""
    from accelerate import PartialState

    rank = DistributedInterface().rank
    PartialState(cpu=True)  # TRL's logger asks it
    lowmem_load.install()
    for way in ("mixtral", "sharded", "llama lora", "sharded lora"):
        name = "llama" if "lora" in way else "mixtral"
        if "sharded" in way:
            model = filled(paths[name], next(iter(meshes(2).values())))
            model = adapted("odd", model) if "lora" in way else model
        else:
            model = load_model(paths[name], FP32)
            with streaming(FP32):
                model = adapted("odd", model) if "lora" in way else model
        before = model_digest(model)
        wanted = dict(pair for bucket in iter_weights(model, merge_adapters="lora" in way) for pair in bucket)
        for folder, trainer_name in ASYNC.items():
            server, Server.weights, Server.data = AsyncServer(), {}, queue.Queue()  # the last one may have been left
            trainer = async_trainer(f"trl.experimental.{folder}", trainer_name, model, server)
            trainer._sync_weight()
            steps = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]
            assert server.calls == (steps if rank == 0 else [])
            if rank == 0:
                assert_equal(Server.weights, wanted, (way, folder))
                assert trainer.weight_transfer._weight_update_info["names"] == ["of init"]
                assert trainer.model_version == 1
        assert model_digest(model) == before and "merge_adapter" not in vars(model), way
        gone = async_trainer("trl.experimental.async_grpo", ASYNC["async_grpo"], model, AsyncServer(is_gone=True))
        with pytest.raises(RankError, match=r"rank 0: RuntimeError: Weight sync to the vLLM server .* failed"):
            gone._sync_weight()
        assert "merge_adapter" not in vars(model)


def sync_adapters_asynchronously(path: str, out: str) -> None:
    """Rank function: the adapter in the folder that AsyncGRPO tells its server of is what PEFT saves of the model."""
    from accelerate import PartialState

    PartialState(cpu=True)
    lowmem_load.install()
    rank, whole = DistributedInterface().rank, Path(out, str(DistributedInterface().rank))
    for way, model in models_with_adapters(path):
        if way == "whole":
            model.save_pretrained(whole)
            continue
        for folder, trainer_name in ASYNC.items():
            for adapter, expected in (("default", whole), ("other", whole / "other")):
                server = AsyncServer()
                trainer = async_trainer(f"trl.experimental.{folder}", trainer_name, model, server)
                vars(trainer).update(vllm_client=server, args=SimpleNamespace(max_staleness=1), _lora_sync=True)
                vars(trainer).update(_lora_dir=f"{out}/{way}", _lora_name="policy", _adapter_name=adapter)
                for version in (1, 2):
                    trainer._sync_weight()
                    trainer.model_version = version  # which TRL counts on rank 0
                    assert server.calls == ["pause", "load_lora_adapter", "resume"] * version * (rank == 0)
                    made = Path(out, way, f"policy-v{version}")
                    tensors = [load_file(each / "adapter_model.safetensors") for each in (made, expected)]
                    assert_equal(*tensors, (way, adapter))
                    assert (made / "adapter_config.json").read_text() == (expected / "adapter_config.json").read_text()
                assert len([*made.parent.iterdir()]) == 2, "nothing else is there"
        torch.distributed.barrier()
        if rank == 0:
            os.rename(f"{out}/{way}", f"{out}/{way} old")
            Path(out, way).write_text("a file")
        with pytest.raises(RankError, match="policy-v3"):
            trainer._sync_weight()
        torch.distributed.barrier()
        if rank == 0:
            os.remove(f"{out}/{way}")
        trainer.vllm_client = AsyncServer(is_gone=True)
        began_s = time.monotonic()
        with pytest.raises(RankError, match=r"handing over the adapter failed .*\n.*rank 0: .*refused"):
            trainer._sync_weight()
        assert time.monotonic() - began_s < 10, "no rank waits for rank 0"


def test_trl_hands_over_adapters_alone(checkpoints: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer")
    path = builders.tiny_llama(checkpoints, torch.float32, **builders.ODD_SIZES)
    run_ranks(sync_adapters_asynchronously, str(path), str(tmp_path), timeout_s=150)


@pytest.mark.parametrize(
    ("module", "sync", "other"),
    [
        ("trl.generation.vllm_generation", sync_as_trl, {"tied": builders.tiny_qwen2_tied}),
        ("trl.experimental.async_grpo.async_grpo_trainer", sync_asynchronously, {"mixtral": builders.tiny_mixtral}),
    ],
)
def test_trl_syncs(checkpoints: Path, module: str, sync: Callable[[dict[str, str]], None], other: Any) -> None:
    pytest.importorskip(module)
    build = {"llama": builders.tiny_llama, **other}
    run_ranks(sync, {name: str(one(checkpoints, torch.float32)) for name, one in build.items()}, timeout_s=200)
