"""Checkpoints on the Hub, on a server of this machine: headers alone are fetched, and each once."""

import contextlib
import json
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lowmem_load.files.object_store import RemoteObject
from lowmem_load.files.remote_file import HEAD_BYTES, RemoteFile
from lowmem_load.files.source import LocalFile
from lowmem_load.files.torch_zip import TorchZip
from tests.builders import as_torch_bin, tiny_mixtral
from tests.hub import pointed_at
from tests.remote.hub_front import HubServer

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
