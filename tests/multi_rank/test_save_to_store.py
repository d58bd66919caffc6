"""Saves straight into an object store: the files of a save to a disk, all at once, or the former ones and an error."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_load import CheckpointError, ConfigError, RankError, consolidate, load_model, save_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.files import object_store, store_folder
from lowmem_load.weights_out import store
from tests import builders
from tests.model_digest import model_digest
from tests.multi_rank.test_load_into import filled, meshes, start
from tests.multi_rank.test_save import FP32, equal_folders
from tests.ranks import RankFailure, run_ranks
from tests.remote import stores
from tests.remote.answering import assert_no_secrets
from tests.remote.range_server import range_server
from tests.remote.upload_server import UploadServer
from tests.unit.conftest import S3
from tests.zero_checkpoint import save_zero3

SHARD = "30KB"
RUN = "s3://bucket/run"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[UploadServer]:
    (tmp_path / "bucket").mkdir()
    with contextlib.closing(UploadServer({"bucket": tmp_path / "bucket"})) as found:
        yield found


def run(function: Callable[..., Any], server: UploadServer, *args: Any, world_size: int = 2) -> list[Any]:
    env = {**S3, "AWS_ENDPOINT_URL": server.url}
    return run_ranks(function, *args, world_size=world_size, timeout_s=240, env=env)


def make_small() -> None:
    """Have small files go out in many parts and buckets; of these some end within a tensor."""
    store.BUCKET_BYTES = 3000
    store_folder.PART_BYTES, store_folder.IN_FLIGHT_BYTES = 2000, 5000
    object_store.PATIENCE_S = 5


def sharded(path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model under ZeRO-3, and on a mesh."""
    yield "zero3", load_model(path, FP32)
    shard = next(iter(meshes(torch.distributed.get_world_size()).values()))
    yield "mesh", filled(path, shard)


def save_both(paths: dict[str, str], folder: str, url: str) -> None:
    """Rank function: saves each model to a store and to a disk."""
    if url == RUN:
        make_small()
    world_size = start()
    for name, path in paths.items():
        for way, model in sharded(path):
            save_model(model, f"{folder}/{way}-{name}", max_shard_size=SHARD)
            report = save_model(model, f"{url}/{way}-{name}/", max_shard_size=SHARD)
            assert report.folder == f"{url}/{way}-{name}"
            found: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(found, report.written_bytes)
            assert all(found)
            assert sum(report.files.values()) > sum(found) > 0.8 * sum(report.files.values())
    save_model(model, f"{folder}/cast", dtype=torch.float16)
    save_model(model, f"{url}/cast", dtype=torch.float16)
    again = load_model(f"{url}/{way}-{name}", FP32)
    assert model_digest(again) == model_digest(load_model(path, FP32))


@pytest.mark.parametrize("world_size", [2, 4])
def test_files_are_those_of_a_save_to_a_disk(
    world_size: int, checkpoints: Path, server: UploadServer, tmp_path: Path
) -> None:
    """Also where a server asks for patience, and drops connections."""
    paths = {"experts": str(builders.tiny_qwen3_moe(checkpoints, torch.float32))}
    if world_size == 2:
        paths |= {
            "odd": str(builders.tiny_llama(checkpoints, torch.float32, **builders.ODD_SIZES)),
            "tied": str(builders.tiny_qwen2_tied(checkpoints, torch.float32)),
        }
        server.set(error_503=0.05, slow_down=0.05, reset_before=0.05)
    run(save_both, server, paths, str(tmp_path / "disk"), RUN, world_size=world_size)
    assert bool(server.stats()["faults"]) == (world_size == 2)
    equal_folders(tmp_path / "bucket" / "run", tmp_path / "disk")
    assert server.uploads == {}
    for path, sizes in server.completed.items():
        assert len(set(sizes[:-1])) < 2, path
        assert sizes[-1] == sizes[0] or sizes[-1] < len(sizes), path  # all but some bytes have arrived before


def consolidate_both(checkpoint: str, folder: str) -> None:
    """Rank function."""
    make_small()
    ranks = DistributedInterface()
    for place in (f"{folder}/all", f"{RUN}/all"):
        consolidate(checkpoint, place, max_shard_size=SHARD, ranks=ranks)
        if ranks.rank == 0:
            consolidate(checkpoint, place.replace("all", "alone"), dtype=torch.bfloat16)


def test_a_training_checkpoint_is_converted_into_a_store(
    checkpoints: Path, server: UploadServer, tmp_path: Path
) -> None:
    """The parts of its stacked experts go to files in pieces."""
    path = builders.tiny_qwen3_moe(checkpoints, torch.float32)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    trained = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_zero3(tmp_path / "saved", trained, world_size=3, sub_group_size=700)
    model.config.save_pretrained(tmp_path / "saved")
    run(consolidate_both, server, str(tmp_path / "saved"), str(tmp_path / "disk"))
    equal_folders(tmp_path / "bucket" / "run", tmp_path / "disk")


# -- failures ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def when_writing(act: Callable[[], object]) -> Iterator[None]:
    """Do something on rank 1 when it has written some of its file."""
    ordinary, count, rank = store_folder.Upload.write, [0], torch.distributed.get_rank()

    def counted(self: store_folder.Upload, data: torch.Tensor) -> None:
        count[0] += 1
        if count[0] == 4 and rank == 1:
            act()
        ordinary(self, data)

    with mock.patch.object(store_folder.Upload, "write", counted):
        yield


def fail(path: str, folder: str, refusing: str) -> None:
    """Rank function: saves that fail. They raise one error on all ranks, and leave the files as they were."""
    make_small()
    object_store.TIMEOUT_S, object_store.PATIENCE_S = 1, 0.2
    rank = DistributedInterface().rank
    model = load_model(path, FP32)

    def stop() -> None:
        raise ZeroDivisionError("as it was told to")

    def begin_second() -> None:
        store_folder.StoreFolder(RUN).put(store.MARKER, b"second")

    def content() -> dict[str, bytes]:
        torch.distributed.barrier()
        found = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != store.MARKER}
        torch.distributed.barrier()
        return found

    def error_of(url: str, act: Callable[[], object] = lambda: None) -> str:
        with when_writing(act), pytest.raises(RankError) as caught:
            save_model(model, url, max_shard_size=SHARD)
        assert_no_secrets(str(caught.value))
        assert content() == before
        return str(caught.value)

    before = content()
    assert "rank 1: ZeroDivisionError: as it was told to" in error_of(RUN, stop)
    text = error_of(RUN, begin_second)
    assert "rank 0: CheckpointError: s3://bucket/run: a second save to this folder has begun" in text
    text = error_of(f"{RUN}-{rank}")
    assert "has the store s3://bucket/run-1" in text or "has the store s3://bucket/run-0" in text
    with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": refusing} if rank else {}):
        text = error_of(RUN)
    assert "rank 1: CheckpointError: s3://bucket/run/model-0000" in text
    assert "cannot be written: PermissionDeniedError, 403" in text and "rank 0" not in text
    for url in ("https://host/bucket", "hf://buckets/org/name", Path(RUN)):
        with pytest.raises(ConfigError, match=r"is a URL that cannot be written to here: .* s3://, gs:// and az://"):
            save_model(model, url)
    assert content() == before


def test_a_save_that_fails_leaves_the_former_files(checkpoints: Path, server: UploadServer, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    before = AutoModelForCausalLM.from_pretrained(path)
    before.save_pretrained(tmp_path / "bucket" / "run", max_shard_size=SHARD)  # files of the same names
    with range_server(tmp_path / "bucket", gone=True, repeats=True) as refusing:
        run(fail, server, str(path), str(tmp_path / "bucket" / "run"), refusing.url)
    assert server.uploads == {}
    assert server.stats()["methods"]["DELETE"] > 4
    assert not (tmp_path / "bucket" / "run" / store.MARKER).exists()


def die(path: str) -> None:
    """Rank function: rank 1 is killed when it has written some of its file."""
    make_small()
    model = load_model(path, FP32)
    with when_writing(lambda: os.kill(os.getpid(), signal.SIGKILL)):
        save_model(model, RUN, max_shard_size=SHARD)


def test_a_rank_that_is_killed_leaves_the_former_files(checkpoints: Path, server: UploadServer, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints, torch.float32)
    before = AutoModelForCausalLM.from_pretrained(path)
    for parameter in before.parameters():
        parameter.data.mul_(2)
    before.save_pretrained(tmp_path / "bucket" / "run", max_shard_size=SHARD)
    with pytest.raises(RankFailure, match="rank 1"):
        run(die, server, str(path))
    assert server.uploads  # it had begun
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "bucket" / "run").state_dict()
    assert all(torch.equal(found[name], value) for name, value in before.state_dict().items())


def save_at_once(checkpoint: str) -> tuple[torch.dtype, str]:
    """Rank function: each rank is a job of its own, and both have begun before either one goes on."""
    make_small()
    dtype = (torch.float32, torch.bfloat16)[DistributedInterface().rank]
    ordinary = store_folder.StoreFolder.put

    def put(self: store_folder.StoreFolder, key: str, content: bytes) -> None:
        ordinary(self, key, content)
        if key == store.MARKER:
            torch.distributed.barrier()

    with mock.patch.object(store_folder.StoreFolder, "put", put):
        try:
            consolidate(checkpoint, RUN, dtype=dtype, max_shard_size=SHARD)
        except CheckpointError as error:
            return dtype, str(error)
    return dtype, ""


def test_of_two_saves_at_once_one_is_there_and_the_other_one_fails(server: UploadServer, tmp_path: Path) -> None:
    save_zero3(tmp_path / "saved", {f"w{number}": torch.randn(50, 100) for number in range(5)}, world_size=2)
    answers = run(save_at_once, server, str(tmp_path / "saved"))
    ((winner, _),) = (answer for answer in answers if not answer[1])
    ((_, text),) = (answer for answer in answers if answer[1])
    assert text.startswith("s3://bucket/run: a second save to this folder has begun")
    files = [load_file(path) for path in (tmp_path / "bucket" / "run").glob("*.safetensors")]
    assert sorted(name for file in files for name in file) == [f"w{number}" for number in range(5)]
    assert {tensor.dtype for file in files for tensor in file.values()} == {winner}
    assert not (tmp_path / "bucket" / "run" / store.MARKER).exists()
    assert server.uploads == {}


# -- servers of others -------------------------------------------------------------------------------------------------


@pytest.mark.release
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("begin", "program"), [(stores.s3, stores.MOTO), (stores.azure, stores.AZURITE)])
def test_files_in_real_stores_are_those_of_a_save_to_a_disk(
    world_size: int,
    begin: Callable[[], contextlib.AbstractContextManager[stores.Server]],
    program: Path,
    checkpoints: Path,
    tmp_path: Path,
) -> None:
    if not program.exists():
        pytest.skip("not installed by `make test-stores`")
    names = {"llama": builders.tiny_llama, "experts": builders.tiny_qwen3_moe, "tied": builders.tiny_qwen2_tied}
    paths = {name: str(build(checkpoints, torch.float32)) for name, build in names.items()}
    with begin() as found:
        url = f"{found.root}/real"
        run_ranks(
            save_both, paths, str(tmp_path / "disk"), url, world_size=world_size, timeout_s=240, env=found.environment
        )
        found.download("real", tmp_path / "run")
    equal_folders(tmp_path / "run", tmp_path / "disk")
