"""Checkpoints on the Hub, on a server of this machine: headers alone are fetched, and each once."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from lowmem_load.errors import CheckpointError, TruncatedFileError
from lowmem_load.formats.torch_zip import TorchZip
from lowmem_load.hf.remote_names import located_checkpoint
from lowmem_load.io import remote_file
from lowmem_load.io.http_files import HttpObject
from lowmem_load.io.remote_file import HEAD_BYTES, RemoteFile
from lowmem_load.io.source import LocalFile, read_bytes
from tests.builders import as_torch_bin, tiny_mixtral
from tests.hub_server import COMMIT, Hub, hub
from tests.ranks import REPO

DS_CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}

SCRIPT = """
import sys
from lowmem_load.cli.start import app
for name in ("org/safe", "org/bin"):
    app(["inspect", name, "--json"], standalone_mode=False)
app(["plan", "org/safe", "--ds-config", sys.argv[1], "--world-size", "3", "--json"], standalone_mode=False)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(200)))
    return path


def source(server: Hub, file: Path, nbytes: int = 200) -> RemoteFile:
    return RemoteFile(HttpObject(f"{server.url}/org/model/resolve/main/{file.name}", nbytes, "v", of_hub=True))


def test_ranges_are_read(file: Path) -> None:
    with hub({"org/model": file.parent}) as server:
        found = source(server, file)
        assert read_bytes(found, 8, 4) == bytes(range(8, 12))
        assert read_bytes(found, 100, 5) == bytes(range(100, 105))
        assert (server.requests[file.name], server.sent[file.name]) == (2, 9)
        with pytest.raises(TruncatedFileError, match="ended at byte 200"):
            found.read_into(190, memoryview(bytearray(11)))


@pytest.mark.parametrize("numel", [100, 30_000])
def test_of_a_torch_file_its_directory_and_its_pickle_are_fetched(numel: int, tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({f"w{number}": torch.full((numel + number,), number) for number in range(40)}, path)
    with hub({"org/model": tmp_path}) as server:
        found = source(server, path, path.stat().st_size)
        described, local = (TorchZip().describe(each) for each in (found, LocalFile(str(path))))
        assert described.digest == local.digest and described.names == local.names
        assert server.requests[path.name] <= 8
        assert server.sent[path.name] < 13_000


def test_headers_that_torch_would_write_otherwise_are_fetched(tmp_path: Path) -> None:
    path, written = tmp_path / "pytorch_model.bin", tmp_path / "written.bin"
    torch.save({f"w{number}": torch.full((number,), number) for number in (*range(1, 10), 100_000)}, written)
    with zipfile.ZipFile(written) as torchs, zipfile.ZipFile(path, "w") as others:
        for info in torchs.infolist():
            others.writestr(info.filename, torchs.read(info))
    with hub({"org/model": tmp_path}) as server:
        found = source(server, path, path.stat().st_size)
        described, local = (TorchZip().describe(each) for each in (found, LocalFile(str(path))))
        assert described.digest == local.digest and described.names == local.names
        assert server.sent[path.name] < 40_000  # of 400 kB


def test_a_server_without_ranges_is_refused(file: Path) -> None:
    with (
        hub({"org/model": file.parent}, ignores_ranges=True) as server,
        pytest.raises(CheckpointError, match="answers a request for bytes 0-7/200 with status 200"),
    ):
        read_bytes(source(server, file), 0, 8)


def test_a_server_that_sends_other_bytes_or_more_is_refused(file: Path) -> None:
    with (
        hub({"org/model": file.parent}, shifts=1) as server,
        pytest.raises(CheckpointError, match="bytes 8-11/200 with status 206 and range 'bytes 9-12/200'"),
    ):
        read_bytes(source(server, file), 8, 4)
    with (
        hub({"org/model": file.parent}, adds=32 << 20) as server,
        pytest.raises(CheckpointError, match="sent more than 4 bytes"),
    ):
        read_bytes(source(server, file), 8, 4)


def test_a_server_that_is_gone_or_has_less_is_an_error_of_ours(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub({"org/model": file.parent}) as server:
        with pytest.raises(CheckpointError, match="bytes 150-249/1000 with status 206 and range 'bytes 150-199/200'"):
            read_bytes(source(server, file, 1000), 150, 100)
        with pytest.raises(CheckpointError, match=r"is not there \(status 404\)"):
            read_bytes(source(server, file.with_name("other")), 0, 1)
    monkeypatch.setattr(remote_file, "PATIENCE_S", 0.2)
    with pytest.raises(
        CheckpointError, match=r"cannot be read at bytes 0 to 0: NewConnectionError.*refused.* attempts in"
    ):
        read_bytes(source(Hub("http://127.0.0.1:1"), file), 0, 1)


def test_a_name_that_is_neither_folder_nor_cached(tmp_path: Path) -> None:
    for name in ("./nothing", str(tmp_path / "nothing"), "a/b/c"):
        with pytest.raises(CheckpointError, match=r"no such folder(\Z| in /)"):
            located_checkpoint(name)
    with pytest.raises(CheckpointError, match="not in the cache of the Hub"):
        located_checkpoint("org/nothing")


def _header_nbytes(path: Path) -> int:
    return 8 + int(struct.unpack("<Q", path.read_bytes()[:8])[0])


def test_of_weights_on_the_hub_only_headers_are_fetched(tmp_path: Path) -> None:
    safe = tiny_mixtral(tmp_path)
    folders = {"org/safe": safe, "org/bin": as_torch_bin(safe)}
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(DS_CONFIG))
    with hub(folders) as server:
        env = {**os.environ, "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        found = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(config)],
            cwd=REPO,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert found.returncode == 0, found.stderr
    decoder, text, answers = json.JSONDecoder(), found.stdout, []
    while text.strip():
        answer, end = decoder.raw_decode(text.lstrip())
        text = text.lstrip()[end:]
        answers.append(answer)
    inspected, of_bin, planned = answers
    shards = sorted(folders["org/safe"].glob("*.safetensors"))
    heads = [min(HEAD_BYTES, path.stat().st_size) for path in shards]
    assert inspected["revision"] == COMMIT
    assert [server.sent[path.name] for path in shards] == heads  # `inspect` found what `plan` needs
    assert inspected["num_elements"] == of_bin["num_elements"] > 0
    bins = sorted(folders["org/bin"].glob("*.bin"))
    assert sum(server.sent[path.name] for path in bins) < sum(path.stat().st_size for path in bins) / 3
    assert planned["costs"]["read_bytes"] > 0
    assert sum(path.stat().st_size for path in shards) in [need["stock_bytes"] for need in planned["needs"]]
