"""Loads from remote stores: bit for bit the ordinary ones, each byte asked for once, and one error if they fail."""

import contextlib
import functools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import lowmem_load
from lowmem_load import CheckpointError, RankError, get_load_report, install, load_into, load_model, local_folder
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.files import object_store, stand_ins
from lowmem_load.integrations.install import streaming, uninstall
from lowmem_load.load import load as loading
from lowmem_load.load import read_once as module
from tests import builders
from tests.hub import pointed_at
from tests.model_digest import differing
from tests.multi_rank.test_load_into import built, shard_fully
from tests.parity import BF16, FP32, assert_loads_alike, differences
from tests.ranks import run_ranks
from tests.remote.hub_front import hub_front
from tests.remote.range_server import FarServer, RangeServer, range_server

BUCKET = "bucket"
S3 = {"AWS_REGION": "us-east-1", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
PATIENCE_S = 15
"""Seconds in which all ranks must have the error of one."""

Case = tuple[str, dict[str, Any], str | None, torch.dtype]
"""Folder, ds_config, auto class, and dtype of the ordinary load."""


@dataclass(frozen=True)
class Place:
    """Where ranks find the checkpoints of the tests: a server that is an HTTP server and S3."""

    url: str
    temporary: str
    """Folder for temporary files."""

    def __call__(self, folder: str, scheme: str) -> str:
        """The URL of a checkpoint."""
        name = os.path.basename(folder)
        return f"s3://{BUCKET}/{name}" if scheme == "s3" else f"{self.url}/{BUCKET}/{name}"

    @property
    def server(self) -> FarServer:
        """What it has done, and how it fails."""
        return FarServer(self.url)

    def start(self) -> int:
        """Make this process ready, a rank; returns its number."""
        stand_ins.HEAD_BYTES = 2048  # of files that are small themselves
        tempfile.tempdir = self.temporary
        object_store.DELAYS_S = (0.1, 0.1)
        return DistributedInterface().rank

    def set(self, **changes: Any) -> None:
        """Have the server behave otherwise, between two loads. All ranks must call it."""
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            self.server.set(**changes)
            self.server.reset()
        torch.distributed.barrier()

    def stats(self) -> dict[str, Any]:
        """What the server has done for all ranks, which must all call it."""
        torch.distributed.barrier()
        found = self.server.stats(asked=True)
        torch.distributed.barrier()
        return found


@pytest.fixture(scope="module")
def server(checkpoints: Path) -> Iterator[RangeServer]:
    with range_server({BUCKET: checkpoints}) as found:
        yield found


@pytest.fixture
def place(server: RangeServer, tmp_path: Path) -> Iterator[Place]:
    before = server.behaviour
    server.reset()
    yield Place(server.url, str(tmp_path))
    server.behaviour = before


def run(function: Callable[..., Any], place: Place, *args: Any) -> list[Any]:
    """As `run_ranks`, with the environment of an owner of the store."""
    env = {**S3, "AWS_ENDPOINT_URL": place.url}
    return run_ranks(function, place, *args, timeout_s=240, env=env)


# -- what is loaded ----------------------------------------------------------------------------------------------------


def cases(checkpoints: Path) -> list[Case]:
    float32, bfloat16 = torch.float32, torch.bfloat16
    odd = builders.tiny_llama(checkpoints, float32, "20KB", **builders.ODD_SIZES)
    bert = builders.tiny_bert(checkpoints)
    return [
        (str(builders.tiny_llama(checkpoints)), BF16, None, bfloat16),
        (str(odd), BF16, "AutoModelForCausalLM", bfloat16),
        (str(builders.tiny_qwen2_tied(checkpoints)), BF16, None, bfloat16),
        (str(builders.tiny_mixtral(checkpoints, max_shard_size="50KB")), BF16, None, bfloat16),
        (str(bert), FP32, "AutoModel", float32),
        (str(bert), FP32, "AutoModelForSequenceClassification", float32),  # whose head is random
        (str(builders.as_torch_bin(builders.tiny_llama(checkpoints, float32), num_files=2)), FP32, None, float32),
    ]


def load_partitions(place: Place, cases: list[Case]) -> None:
    place.start()
    for scheme in ("http", "s3"):
        for case in cases:
            url = place(case[0], scheme)
            report = assert_loads_alike(*case, name=url)
            assert report.name == url
            assert report.requests.num_requests > 0
            assert f"\n  requests: {report.requests.num_requests:,}, " in str(report)
            assert "again after" not in str(report)
    report = assert_loads_alike(*cases[0])
    assert report.requests == type(report.requests)()
    assert "requests" not in str(report)


def load_shards(place: Place, paths: list[str]) -> None:
    """Rank function: FSDP2 by a mesh, and into a model that is there."""
    place.start()
    world_size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    for path, scheme in zip(paths, ("http", "s3"), strict=True):
        url, reference = place(path, scheme), transformers.AutoModelForCausalLM.from_pretrained(path)
        model = load_model(url, mesh=mesh, dtype=torch.bfloat16)
        assert differing(model, reference) == [], url
        assert model.config.name_or_path == url
        assert get_load_report(model).requests.num_requests > 0
        model = built(path, torch.bfloat16)
        shard_fully(model, mesh=mesh)
        model.to_empty(device="cpu")
        report = load_into(model, url)
        assert differing(model, reference.to(torch.bfloat16)) == [], url
        assert report.name == url


# -- scripts -----------------------------------------------------------------------------------------------------------


def run_script(place: Place, path: str) -> None:
    """Rank function: what a script does with the folder of a URL, in a block and installed."""
    place.start()
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    for scheme in ("http", "s3"):
        url = place(path, scheme)
        folder = local_folder(url)
        with streaming(BF16):
            config = AutoConfig.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, config=config)
            exact, info = LlamaForCausalLM.from_pretrained(url, output_loading_info=True)
            from_config = AutoModelForCausalLM.from_config(config)
        assert differences(model.eval(), reference) == differences(exact, reference) == []
        assert not info["missing_keys"]
        assert from_config.config.hidden_size == config.hidden_size
        assert {each.name_or_path for each in (model.config, exact.config, model, exact)} == {url}
        assert get_load_report(model).name == get_load_report(exact).name == url
        reports: list[Any] = []
        lowmem_load.install(on_load=reports.append)
        alive = HfDeepSpeedConfig(BF16)
        installed = AutoModelForCausalLM.from_pretrained(folder)
        del alive
        lowmem_load.integrations.install.uninstall()
        assert differences(installed, reference) == []
        assert [report.name for report in reports] == [url]


# -- what is read ------------------------------------------------------------------------------------------------------


def read_once(place: Place, path: str) -> dict[str, int]:
    """Rank function: bytes that the server has sent for a load, by how it was loaded."""
    place.start()
    module.LEAST_BYTES, least_bytes = 0, module.LEAST_BYTES
    reference, sent = transformers.AutoModelForCausalLM.from_pretrained(path), {}
    for scheme in ("http", "s3"):
        for stage in (0, 2, 3):
            place.set()
            model = load_model(place(path, scheme), {**BF16, "zero_optimization": {"stage": stage}})
            sent[f"{scheme}, stage {stage}"] = place.stats()["bytes_sent"]
            report = get_load_report(model)
            assert (report.received_bytes > 0) is (stage < 3), str(report)
            if stage == 3:
                assert differences(model, reference) == []
            else:
                values, expected = model.state_dict(), reference.state_dict()
                assert values.keys() == expected.keys()
                assert [name for name in values if not torch.equal(values[name], expected[name])] == []
    module.LEAST_BYTES = least_bytes
    return sent


def load_from_copies(place: Place, path: str) -> None:
    """Rank function: a restart asks the store for no weights, unless an object was replaced; on ZeRO-3 and a mesh."""
    rank, reference, url = place.start(), transformers.AutoModelForCausalLM.from_pretrained(path), place(path, "s3")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def weights_sent(**target: Any) -> dict[str, int]:
        place.set()
        copies = f"{place.temporary}/copies-{'mesh' in target}"  # else a mesh finds what ZeRO-3 has read
        model = load_model(url, dtype=torch.bfloat16, local_copy=copies, **target)
        assert (differing if "mesh" in target else differences)(model, reference) == []
        sent = place.stats()["path_bytes"]
        return {name.rpartition("/")[2]: nbytes for name, nbytes in sent.items() if name.endswith(".safetensors")}

    for target in ({"ds_config": BF16}, {"mesh": mesh}):
        assert weights_sent(**target)
        assert weights_sent(**target) == {}
    first, *others = sorted(Path(path).glob("*.safetensors"))
    if rank == 0:
        os.utime(first)
    sent = weights_sent(mesh=mesh)
    assert sent.pop(first.name) >= first.stat().st_size * 0.95
    assert sent == {other.name: stand_ins.HEAD_BYTES for other in others}
    assert weights_sent(mesh=mesh) == {}


def large_llama(checkpoints: Path) -> Path:
    """A checkpoint of more bytes than the headers and small files of a load are."""
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "vocab_size": 16_000, "num_hidden_layers": 4}
    path = builders.tiny_llama(checkpoints, max_shard_size="20MB", **sizes)
    assert 20e6 < sum(file.stat().st_size for file in path.iterdir()) < 60e6
    return path


def load_all(place: Place, arguments: dict[Callable[..., Any], Any]) -> list[Any]:
    """Rank function: all that loads from a folder, one after the other: a launch takes longer than any of them."""
    return [function(place, argument) for function, argument in arguments.items()]


def test_what_loads_from_a_folder_loads_from_a_url(checkpoints: Path, place: Place) -> None:
    large = large_llama(checkpoints)
    mixtral, llama = builders.tiny_mixtral(checkpoints), builders.tiny_llama(checkpoints, max_shard_size="50KB")
    arguments: dict[Callable[..., Any], Any] = {
        load_partitions: cases(checkpoints),
        load_shards: [str(mixtral), str(llama)],
        run_script: str(llama),
        load_from_copies: str(shutil.copytree(llama, checkpoints / "remote-copied", dirs_exist_ok=True)),
        read_once: str(large),
    }
    answers = run(load_all, place, arguments)
    total = sum(file.stat().st_size for file in large.iterdir())
    for *_, sent in answers:
        assert {way: nbytes for way, nbytes in sent.items() if not total * 0.95 < nbytes <= total * 1.05} == {}


# -- the Hub -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hub:
    """A Hub that ranks ask, which sends them to another host for weights."""

    url: str
    files: str

    def stats(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the Hub and the other host have done."""
        torch.distributed.barrier()
        hub, files = (FarServer(url).stats(asked=True) for url in (self.url, self.files))
        torch.distributed.barrier()
        return hub, files


@contextlib.contextmanager
def hub_of(folders: dict[str, Path], **behaviour: Any) -> Iterator[Hub]:
    with hub_front(folders, **behaviour) as server:
        assert server.files is not None
        yield Hub(server.url, server.files.url)


def assert_shards_are_read_by_ranges(reference: Any) -> None:
    """Load onto a mesh, and by a `DistributedConfig` in a script. The caller sees whether weights were downloaded."""
    from torch.distributed.device_mesh import init_device_mesh

    from lowmem_load import install, load_model
    from tests.model_digest import differing

    if not hasattr(transformers.PreTrainedModel, "maybe_distribute_model"):
        return
    from transformers.distributed import DistributedConfig

    world_size = torch.distributed.get_world_size()
    mesh, config = init_device_mesh("cpu", (world_size,)), DistributedConfig(fsdp_size=world_size)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "token": "hub-token"}
    by_mesh = load_model("org/model", mesh=mesh, download=False, **how)
    with install(download=False):
        by_config = transformers.AutoModelForCausalLM.from_pretrained("org/model", distributed_config=config, **how)
    assert differing(by_mesh, reference) == differing(by_config, reference) == []
    assert by_mesh.config.name_or_path == by_config.config.name_or_path == "org/model"


def load_from_the_hub(place: Place, hub: Hub, case: Case) -> list[str]:
    """Rank function: without a download, in a script, and by the cache; returns what the Hub was asked for the last."""
    from huggingface_hub import snapshot_download

    rank, reference = place.start(), transformers.AutoModelForCausalLM.from_pretrained(case[0], dtype=case[3])
    of_hub: dict[str, Any] = {"name": "org/model", "download": False, "token": "hub-token"}
    with pointed_at(hub.url, f"{place.temporary}/ours"):
        report = assert_loads_alike(*case, **of_hub)
        assert report.requests.num_requests > 0
        with streaming(BF16, stream=True):
            again = transformers.AutoModelForCausalLM.from_pretrained(
                "org/model", dtype=torch.bfloat16, token="hub-token"
            )
        assert differences(again, reference) == []
        assert_shards_are_read_by_ranges(reference)
        _, at_files = hub.stats()
        assert at_files["authorized"] == 0
        assert at_files["bytes_sent"] > 0
        kept = Path(place.temporary).rglob("*.safetensors")
        assert [path for path in kept if path.stat().st_size > stand_ins.HEAD_BYTES] == []
    with pointed_at(hub.url, f"{place.temporary}/cached"):
        if rank == 0:
            snapshot_download("org/model", token="hub-token")
        torch.distributed.barrier()
        assert_loads_alike(*case, **of_hub)  # asks for what there may be besides
        at_hub, at_files = hub.stats()
        report = assert_loads_alike(*case, **of_hub)
        assert report.requests.num_requests == 0
        now_at_hub, now_at_files = hub.stats()
        assert now_at_files["requests"] == at_files["requests"]
        return now_at_hub["asked"][len(at_hub["asked"]) :]


def test_models_on_the_hub_are_read_without_a_download(checkpoints: Path, place: Place) -> None:
    case = cases(checkpoints)[1]
    with hub_of({"org/model": Path(case[0])}, token="hub-token") as hub:
        asked = run(load_from_the_hub, place, hub, case)
    assert asked == [["HEAD /org/model/resolve/main/config.json"] * 2] * 2  # by each rank: has the branch moved on?


# -- failures that do not ----------------------------------------------------------------------------------------------


def error_of(act: Callable[[], object]) -> str:
    """The text of the one error that all ranks have, in time."""
    began_s = time.monotonic()
    with pytest.raises((RankError, CheckpointError)) as caught:
        act()
    assert time.monotonic() - began_s < PATIENCE_S
    texts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts
    return str(texts[0])


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Inside, requests that fail are not made again for long, nor waited for."""
    with mock.patch.multiple(object_store, PATIENCE_S=1.5, TIMEOUT_S=1):
        yield


@contextlib.contextmanager
def before_reading(act: Callable[[], object]) -> Iterator[None]:
    """Inside, rank 0 does something between planning and reading."""
    ordinary = loading.agree_on_bytes

    def acting(*args: Any, **kwargs: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            act()
        torch.distributed.barrier()
        return ordinary(*args, **kwargs)

    with mock.patch.object(loading, "agree_on_bytes", acting):
        yield


def fail(place: Place, case: Case, hub: Hub) -> None:
    """Rank function: one failure after the other; a load after each is right."""
    rank, folder = place.start(), case[0]
    for scheme in ("http", "s3"):
        url = place(folder, scheme)

        def load(url: str = url, more: str = "") -> None:
            load_model(url + more, BF16)

        def replace() -> None:
            for path in Path(folder).glob("*.safetensors"):
                os.utime(path, ns=(time.time_ns(), time.time_ns()))

        with before_reading(replace):
            assert "was replaced after its header was read" in error_of(load)
        with before_reading(lambda: place.server.set(gone=True)):
            assert "refuses access" in error_of(load)
        assert "refuses access" in error_of(load)
        place.set(gone=False)
        with before_reading(lambda: place.server.set(error_500=1)), impatient():
            assert "cannot be read: " in error_of(load)
        place.set(error_500=0)
        with before_reading(lambda: place.server.set(stall=1)), impatient():
            assert "cannot be read: " in error_of(load)
        place.set(stall=0)
        missing = "does not list its files" if url.startswith("http") else "no files are there"
        assert missing in error_of(functools.partial(load, more="-not"))
        assert_loads_alike(*case, name=url)
    urls: list[Any] = [None]
    own = RangeServer({BUCKET: Path(folder).parent}) if rank == 0 else None
    if own is not None:
        urls = [own.url]
    torch.distributed.broadcast_object_list(urls)
    with before_reading(lambda: own.close() if own is not None else None), impatient():
        text = error_of(lambda: load_model(f"{urls[0]}/{BUCKET}/{os.path.basename(folder)}", BF16))
    assert "cannot be read: " in text and "error sending request" in text
    with impatient():
        assert "SHA256SUMS: cannot be read" in error_of(lambda: load_model(f"{urls[0]}/{BUCKET}/any", BF16))
    endpoint, refusing = os.environ["AWS_ENDPOINT_URL"], RangeServer(Path(folder), gone=True)
    os.environ["AWS_ENDPOINT_URL"] = refusing.url if rank == 1 else endpoint
    text = error_of(lambda: load_model(place(folder, "s3"), BF16))
    assert "rank 1: RefusedError: s3://" in text and "refuses access" in text and "rank 0" not in text
    os.environ["AWS_ENDPOINT_URL"] = endpoint
    refusing.close()
    with pointed_at(hub.url, f"{place.temporary}/cache"):
        token = "another-token" if rank == 1 else "hub-token"
        text = error_of(lambda: load_model("org/model", BF16, download=False, token=token))
        assert "rank 1: " in text and "rank 0" not in text and "another-token" not in text
        assert_loads_alike(*case, name="org/model", download=False, token="hub-token")


def test_what_fails_is_one_error_on_all_ranks(checkpoints: Path, place: Place) -> None:
    source = builders.tiny_llama(checkpoints, max_shard_size="50KB")
    folder = shutil.copytree(source, checkpoints / "remote-failing", dirs_exist_ok=True)
    with hub_of({"org/model": source}, token="hub-token") as hub:
        run(fail, place, (str(folder), BF16, None, torch.bfloat16), hub)


def load_into_shards(place: Place, folder: str) -> None:
    """Rank function: a URL onto a mesh and in a script, of a model whose configuration names no dtype."""
    from transformers.distributed import DistributedConfig

    place.start()
    reference = transformers.LlamaForCausalLM.from_pretrained(folder)
    for scheme in ("http", "s3"):
        url = place(folder, scheme)
        by_mesh = load_model(url, mesh=init_device_mesh("cpu", (2,)))
        install(strict=True)
        by_config = transformers.LlamaForCausalLM.from_pretrained(
            url, distributed_config=DistributedConfig(fsdp_size=2)
        )
        uninstall()
        for model in (by_mesh, by_config):
            assert differing(model, reference) == []
            assert model.dtype == reference.dtype == torch.bfloat16
            assert model.config.name_or_path == url


@pytest.mark.skipif(not hasattr(transformers.PreTrainedModel, "maybe_distribute_model"), reason="shards no model")
def test_a_url_is_loaded_into_shards(place: Place, checkpoints: Path) -> None:
    folder = checkpoints / "without_dtype"
    shutil.copytree(builders.tiny_llama(checkpoints), folder)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    run(load_into_shards, place, str(folder))
