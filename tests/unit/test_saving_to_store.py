"""Files on their way into an object store: their parts, what is there when, what is asked again, and errors."""

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowmem_load import CheckpointError, ConfigError, UnsupportedError, save_model
from lowmem_load.cli.start import app
from lowmem_load.files import object_store, store_folder
from lowmem_load.files.memory import map_memory
from lowmem_load.files.store_folder import StoreFolder, Upload
from lowmem_load.phases import no_callback
from lowmem_load.weights_out import store as saving
from tests import builders
from tests.remote import stores
from tests.remote.answering import assert_no_secrets
from tests.remote.upload_server import UploadServer
from tests.unit.conftest import S3
from tests.zero_checkpoint import save_zero3

URL = "s3://bucket/run"
KEY = "sub/model.safetensors"


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    return tmp_path / "bucket"


@pytest.fixture
def server(bucket: Path, monkeypatch: pytest.MonkeyPatch, quick_requests: None) -> Iterator[UploadServer]:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(store_folder, "PART_BYTES", 2000)
    monkeypatch.setattr(store_folder, "IN_FLIGHT_BYTES", 16_000)
    with contextlib.closing(UploadServer({"bucket": bucket})) as server:
        key = {"gcs_base_url": server.url, "disable_oauth": True}  # obstore always signs what it writes to GCS
        key |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        others = {"AWS_ENDPOINT_URL": server.url, "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key)}
        for name, value in {**S3, **others}.items():
            monkeypatch.setenv(name, value)
        yield server


def written(data: bytes, url: str = URL, step: int = 777) -> Upload:
    """Return an upload that has got all of a file, a few bytes at a time."""
    upload = Upload(StoreFolder(url), KEY, len(data), no_callback)
    for start in range(0, len(data), step):
        piece = torch.frombuffer(bytearray(data[start : start + step]), dtype=torch.uint8)
        upload.write(piece)
        piece.zero_()  # its memory may be used again
    assert not upload.num_missing
    return upload


@pytest.mark.parametrize("url", [URL, "gs://bucket/run"])
@pytest.mark.parametrize("nbytes", [1, 1999, 2000, 2001, 5000, 16_000, 16_001, 123_457])
def test_a_file_is_there_once_it_is_completed(
    url: str, nbytes: int, server: UploadServer, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[int] = []

    def counted(nbytes: int) -> torch.Tensor:
        mapped.append(nbytes)
        return map_memory(nbytes)

    monkeypatch.setattr(store_folder, "map_memory", counted)
    data = os.urandom(nbytes)
    upload = written(data, url)
    assert len(mapped) <= 2
    assert max(mapped) <= 16_000
    assert not list(bucket.iterdir())
    (parts,) = server.uploads.values()
    assert b"".join(parts[number] for number in sorted(parts)) == data[: nbytes // len(parts) * len(parts)]
    assert len({*map(len, parts.values())}) == 1  # as R2 wants it
    upload.complete()
    assert (bucket / "run" / KEY).read_bytes() == data
    upload.abort()  # which is too late
    assert (bucket / "run" / KEY).exists()


def test_several_parts_are_in_flight(server: UploadServer) -> None:
    server.set(latency_ms=500)
    began_s = time.monotonic()
    written(bytes(16_000))
    assert time.monotonic() - began_s < 3  # one after the other they take 4.5


def test_an_upload_that_is_aborted_leaves_nothing(server: UploadServer, bucket: Path) -> None:
    written(bytes(50_000)).abort()
    upload = Upload(StoreFolder(URL), KEY, 50_000, no_callback)
    upload.write(torch.zeros(30_000, dtype=torch.uint8))
    assert server.uploads
    upload.abort()
    assert server.uploads == {}
    assert not list(bucket.iterdir())


@pytest.mark.parametrize("fault", ["error_500", "error_503", "slow_down", "too_many", "reset_before"])
def test_what_may_pass_is_asked_again(fault: str, server: UploadServer, bucket: Path) -> None:
    server.set(**{fault: 0.5, "at_most": 8})
    data = os.urandom(30_000)
    written(data).complete()
    folder = StoreFolder(URL)
    folder.put("config.json", b"{}")
    assert folder.names(["."]) == {"config.json"}
    assert folder.names(["sub"]) == {KEY}
    folder.delete([KEY, KEY])
    assert server.stats()["faults"] == {fault: 8}
    assert (folder.get("config.json"), folder.get(KEY)) == (b"{}", None)


def test_errors_name_the_file_and_no_secrets(server: UploadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PATIENCE_S", 0.1)
    upload = written(bytes(5001))
    server.set(gone=True, repeats=True)
    for act, name in (
        (upload.complete, KEY),
        (lambda: written(bytes(9000)), KEY),
        (lambda: StoreFolder(URL).put("config.json", b"{}"), "config.json"),
        (lambda: StoreFolder(URL).delete(["config.json"]), "config.json"),
        (lambda: StoreFolder(URL).names(["."]), ""),
    ):
        with pytest.raises(
            CheckpointError, match=f"^{URL}/?{name}: cannot be written: .*403.*check the cred"
        ) as caught:
            act()
        assert_no_secrets(str(caught.value))
    server.set(gone=False, slow_down=1)
    with pytest.raises(CheckpointError, match=f"^{URL}/{KEY}: cannot be written: .*503, SlowDown$"):
        written(bytes(9000))
    server.set(slow_down=0)
    with pytest.raises(CheckpointError, match=r"^s3://none/run/sub/.*: cannot be written: .*404.*the bucket's name"):
        written(bytes(9000), "s3://none/run")


def test_a_wait_ends_when_another_rank_fails(server: UploadServer) -> None:
    server.set(latency_ms=3000)

    def check() -> None:
        raise ZeroDivisionError

    began_s = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        Upload(StoreFolder(URL), KEY, 100, check).write(torch.zeros(100, dtype=torch.uint8))
    assert time.monotonic() - began_s < 2


# -- a folder that is saved to again -----------------------------------------------------------------------------------


def test_a_folder_never_loads_a_mixture(checkpoints: Path, server: UploadServer, bucket: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(builders.tiny_qwen3_moe(checkpoints))

    def changes(size: str) -> list[str]:
        server.changes.clear()
        save_model(model, URL, max_shard_size=size)
        found = [each for each in server.changes if each.endswith((".safetensors", ".index.json"))]
        groups = itertools.groupby(found, lambda each: (each.partition(" ")[0], "-of-" in each))
        return [each for _, group in groups for each in sorted(group)]  # shards come and go in any order

    shards = [f"put model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = "model.safetensors.index.json"
    assert changes("50KB") == [*shards, f"put {index}"]
    gone = [f"delete {index}", *(shard.replace("put", "delete") for shard in shards)]
    assert changes("50KB") == [*gone, *shards, f"put {index}"]
    assert changes("1GB") == [*gone, "put model.safetensors"]
    assert changes("1GB") == ["delete model.safetensors", "put model.safetensors"]
    everything = server.changes[:]
    assert everything.index("delete model.safetensors") < everything.index("put config.json")
    assert everything.index("put config.json") < everything.index("put model.safetensors")
    assert changes("50KB") == ["delete model.safetensors", *shards, f"put {index}"]
    *others, put_index = changes("30KB")
    assert put_index == f"put {index}"
    assert others[:3] == gone
    assert {*others}.isdisjoint(shards)
    assert server.changes[0] == f"put {saving.MARKER}"
    assert server.changes[-1] == f"delete {saving.MARKER}"
    model = AutoModelForCausalLM.from_pretrained(bucket / "run")  # the files of the last one alone


@pytest.mark.parametrize("name", ["run#2", "run?lr=1e-4"])
def test_a_name_that_a_url_would_cut_is_refused(
    name: str, checkpoints: Path, server: UploadServer, bucket: Path
) -> None:
    """The save would go to the folder `run`, and replace what is there."""
    model = AutoModelForCausalLM.from_pretrained(builders.tiny_qwen3_moe(checkpoints))
    with pytest.raises(ConfigError, match=r"has no '\?' and no '#'"):
        save_model(model, URL.replace("run", name))
    assert not server.changes and not (bucket / "run").exists()


def test_a_failure_while_shards_are_replaced_leaves_a_folder_that_does_not_load(
    checkpoints: Path, server: UploadServer, bucket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(builders.tiny_qwen3_moe(checkpoints))
    save_model(model, URL, max_shard_size="50KB")
    complete, lock = Upload.complete, threading.Lock()

    def fail_at_the_second(upload: Upload) -> None:
        with lock:
            server.set(gone=len(server.completed) == 1, repeats=True)
            complete(upload)

    server.completed.clear()
    with monkeypatch.context() as patches:
        patches.setattr(Upload, "complete", fail_at_the_second)
        with pytest.raises(CheckpointError, match=r"model-0000[12]-of.*cannot be written"):
            save_model(model, URL, max_shard_size="50KB")
    server.set(gone=False)
    assert not (bucket / "run" / "model.safetensors.index.json").exists()
    assert len(list((bucket / "run").glob("*.safetensors"))) == 1  # for those who need no index
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(bucket / "run")
    save_model(model, URL, max_shard_size="50KB")
    again = AutoModelForCausalLM.from_pretrained(bucket / "run").state_dict()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    assert not (bucket / "run" / saving.MARKER).exists()


def test_the_command_refuses_a_folder_that_is_not_empty(tmp_path: Path, server: UploadServer, bucket: Path) -> None:
    save_zero3(tmp_path / "saved", {"a.weight": torch.randn(5, 3)}, world_size=2)
    asked = ["consolidate", str(tmp_path / "saved"), URL]
    app(asked, standalone_mode=False)
    assert [path.name for path in (bucket / "run").iterdir()] == ["model.safetensors"]
    with pytest.raises(ConfigError, match=f"{URL}: is not empty; name another folder, or pass --overwrite"):
        app(asked, standalone_mode=False)
    app([*asked, "--overwrite"], standalone_mode=False)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_merged_adapters_are_refused(checkpoints: Path, server: UploadServer) -> None:
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(builders.tiny_llama(checkpoints))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(UnsupportedError, match="merged adapters cannot be saved to a store"):
        save_model(model, URL, merge_adapters=True)
    save_model(model, URL)
    assert "put adapter_model.safetensors" in server.changes


@pytest.mark.release
@pytest.mark.parametrize(("begin", "program"), [(stores.s3, stores.MOTO), (stores.azure, stores.AZURITE)])
def test_parts_in_real_stores(begin: object, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not program.exists():
        pytest.skip("not installed by `make test-stores`")
    data = os.urandom(50_000_001)
    with begin() as found, found.environment_set():  # type: ignore[operator]
        url = f"{found.root}/run"
        written(data, url, 10_000_000).abort()
        upload = written(data, url, 10_000_000)
        assert StoreFolder(url).names(["sub"]) == set()
        upload.complete()
        found.download("run", tmp_path)
        assert (tmp_path / KEY).read_bytes() == data
        StoreFolder(url).delete([KEY, KEY])
        assert StoreFolder(url).names(["sub"]) == set()
        assert StoreFolder(url).get(KEY) is None
