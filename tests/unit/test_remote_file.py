"""Requests of files in remote stores: how large they are, how many at a time, and what ends them."""

import contextlib
import json
import os
import signal
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.files import remote_file
from lowmem_load.files.executor import Executor
from lowmem_load.files.object_store import RemoteObject
from lowmem_load.files.remote_file import (
    HEAD_BYTES,
    Counts,
    RemoteFile,
    map_in_threads,
    request_counts,
    requests_in_flight,
)
from lowmem_load.files.source import LocalFile, read_bytes
from lowmem_load.files.torch_zip import TorchZip
from lowmem_load.planning.expression import Source
from tests.builders import as_torch_bin, tiny_mixtral
from tests.hub import pointed_at
from tests.remote.hub_front import HubServer

CONTENT = bytes(range(256)) * 16
WEIGHT = Source("path", "w", 0, (8,), torch.uint8)


class Memory:
    """A `RemoteObject` in memory."""

    name, nbytes, version = "s3://bucket/file", len(CONTENT), '"1"'

    def __init__(self, act: Callable[[], object] = int) -> None:
        self.asked: list[tuple[int, int]] = []
        self.act = act

    def fetch(self, offset: int, memory: memoryview) -> None:
        self.asked.append((offset, memory.nbytes))
        self.act()
        memory[:] = CONTENT[offset : offset + memory.nbytes]


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_by_requests_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "REQUEST_BYTES", 100)
    item, before = Memory(), request_counts()
    assert read_bytes(RemoteFile(item), 10, 250) == CONTENT[10:260]
    assert item.asked == [(10, 100), (110, 100), (210, 50)]
    assert request_counts().since(before) == Counts(num_requests=3, received_bytes=250)


def test_the_first_bytes_are_not_asked_for_again() -> None:
    item = Memory()
    source = RemoteFile(item, CONTENT[:100])
    assert read_bytes(source, 0, 100) == CONTENT[:100]
    assert read_bytes(source, 99, 1) == CONTENT[99:100]
    assert item.asked == []
    assert read_bytes(source, 99, 2) == CONTENT[99:101]
    assert item.asked == [(99, 2)]


def test_nothing_beyond_the_end_is_asked_for() -> None:
    item = Memory()
    with pytest.raises(TruncatedFileError, match=r"s3://bucket/file: ended at byte 4096 \(4 bytes short\)"):
        RemoteFile(item).read_into(4000, memoryview(bytearray(100)))
    RemoteFile(item).read_into(0, memoryview(bytearray()))
    assert item.asked == []


def test_ranks_of_a_node_share_its_requests() -> None:
    assert [requests_in_flight(ranks) for ranks in (1, 4, 8, 16, 64)] == [16, 16, 8, 4, 4]


# -- an end to it ------------------------------------------------------------------------------------------------------


def test_a_file_that_is_closed_makes_no_further_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "REQUEST_BYTES", 8)
    item = Memory()
    source = RemoteFile(item)
    item.act = source.close
    with pytest.raises(CheckpointError, match="was closed while it was read"):
        read_bytes(source, 0, 16)
    source.close()  # again
    assert len(item.asked) == 1


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def refuse() -> None:
    raise CheckpointError("another rank has failed")


@pytest.mark.parametrize(("check", "error"), [(interrupt, KeyboardInterrupt), (refuse, CheckpointError)])
def test_an_interrupt_or_the_failure_of_another_rank_ends_a_load_from_a_store_that_does_not_answer(
    check: Callable[[], None], error: type[BaseException]
) -> None:
    released = threading.Event()
    item = Memory(act=lambda: released.wait(15))
    began_s = time.monotonic()

    def load() -> None:
        with Executor(num_threads=4, open_source=lambda path: RemoteFile(item)) as executor:
            executor.tasks.check = check
            executor.tasks.run(lambda: executor.read(WEIGHT, 0, torch.empty(8, dtype=torch.uint8)))
            executor.finish()

    try:
        with pytest.raises(error):
            load()
        assert time.monotonic() - began_s < 10  # and not 15
    finally:
        released.set()


@pytest.mark.parametrize("error", [None, OSError("a")])
def test_results_of_threads_come_in_order_and_one_error_ends_the_wait(error: Exception | None) -> None:
    num_checks, go = 0, threading.Event()

    def check() -> None:
        nonlocal num_checks
        num_checks += 1
        go.set()

    def act(number: int) -> int:
        if number == 1 and error is not None:
            raise error
        go.wait(15)
        return number

    if error is None:
        assert map_in_threads(act, range(40), check) == list(range(40))
        assert num_checks > 0
    else:
        with pytest.raises(OSError, match="a"):
            map_in_threads(act, range(40), check)
        go.set()


# -- checkpoints on the Hub, on a server of this machine: headers alone are fetched, and each once ---------------------


DS_CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}


def source(server: HubServer, file: Path) -> RemoteFile:
    url = f"{server.url}/org/model/resolve/main/{file.name}"
    return RemoteFile(RemoteObject(url, "", file.stat().st_size, "v", on_hub=True))


def sent(server: HubServer) -> Counter[str]:
    """Bytes by name of the file."""
    return Counter({path.rpartition("/")[2]: count for path, count in server.stats()["path_bytes"].items()})


@contextlib.contextmanager
def hub(folders: dict[str, Path]) -> Iterator[HubServer]:
    with contextlib.closing(HubServer(folders, None)) as server:
        yield server


def saved(path: Path) -> None:
    torch.save({f"w{number}": torch.full((30_000 + number,), number) for number in range(40)}, path)


def zipped_otherwise(path: Path) -> None:
    """Its headers are not where torch would put them."""
    torch.save({f"w{number}": torch.full((number,), number) for number in (*range(1, 10), 100_000)}, path)
    with zipfile.ZipFile(path) as torchs:
        contents = {info.filename: torchs.read(info) for info in torchs.infolist()}
    with zipfile.ZipFile(path, "w") as others:
        for name, content in contents.items():
            others.writestr(name, content)


@pytest.mark.parametrize(("write", "most"), [(saved, 13_000), (zipped_otherwise, 40_000)])
def test_of_a_torch_file_its_directory_and_its_pickle_are_fetched(
    write: Callable[[Path], None], most: int, tmp_path: Path
) -> None:
    write(path := tmp_path / "pytorch_model.bin")
    with hub({"org/model": tmp_path}) as server, pointed_at(server.url, str(tmp_path / "cache")):
        described, local = (TorchZip().describe(each) for each in (source(server, path), LocalFile(str(path))))
        assert described.digest == local.digest and described.names == local.names
        assert sent(server)[path.name] < most < path.stat().st_size / 9


def test_of_weights_on_the_hub_only_headers_are_fetched(tmp_path: Path, answer: Callable[..., tuple[int, Any]]) -> None:
    safe = tiny_mixtral(tmp_path)
    folders = {"org/safe": safe, "org/bin": as_torch_bin(safe)}
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(DS_CONFIG))
    with hub(folders) as server, pointed_at(server.url, str(tmp_path / "home")):
        asked = ("--ds-config", config, "--world-size", 3, "--json")
        (_, of_safe), (_, of_bin) = (answer("plan", name, *asked) for name in folders)
    shards = sorted(folders["org/safe"].glob("*.safetensors"))
    heads = [min(HEAD_BYTES, path.stat().st_size) for path in shards]
    assert [sent(server)[path.name] for path in shards] == heads
    assert of_safe["costs"]["needed_bytes"] == of_bin["costs"]["needed_bytes"] > 0
    bins = sorted(folders["org/bin"].glob("*.bin"))
    assert sum(sent(server)[path.name] for path in bins) < sum(path.stat().st_size for path in bins) / 3
