"""Names of checkpoints that are not on this machine: which ones are meant, and what transformers does with them."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

import lowmem_load
from lowmem_load.files.stand_ins import is_stand_in, is_url, open_file, origin
from lowmem_load.models.model_folder import find_checkpoint, find_folder, local_folder
from tests import builders
from tests.hub import pointed_at
from tests.remote.hub_front import COMMIT, HubServer, hub_front
from tests.remote.range_server import RangeServer, range_server


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def llama(checkpoints: Path) -> Path:
    return builders.tiny_llama(checkpoints)


@pytest.fixture
def server(llama: Path) -> Iterator[RangeServer]:
    with range_server({"models/llama": llama}) as found:
        yield found


@pytest.fixture
def hub(llama: Path, checkpoints: Path, tmp_path: Path) -> Iterator[HubServer]:
    models = {"org/model": llama, "org/sharded": builders.tiny_llama(checkpoints, max_shard_size="50KB")}
    with hub_front(models) as found, pointed_at(found.url, str(tmp_path / "cache")):
        yield found


# -- which names are meant ---------------------------------------------------------------------------------------------


def test_which_names_are_urls() -> None:
    urls = ["s3://b", "gs://b/c", "abfss://c@a/b", "HTTPS://host/a", "https://u:p@host:8/a"]
    others = ["", "org/model", "/a/folder", "s3:/b", "ftp://host/a", "folder/s3://b", "//host/a", 7, Path("s3://b")]
    assert [name for name in [*urls, *others] if is_url(name)] == urls


@pytest.mark.parametrize("stream", [False, True])
def test_ordinary_folders_stay_as_they_are(stream: bool, llama: Path) -> None:
    kwargs = {"revision": "main", "subfolder": "", "token": "x", "config": object()}
    for name in (str(llama), llama):
        assert find_folder(name, kwargs, stream=stream) == (name, kwargs)
    assert not is_stand_in(str(llama)) and origin(str(llama)) == str(llama)
    path = str(llama / "model.safetensors")
    assert open_file(path).path == path


@pytest.mark.parametrize("name", ["org/model", "nothing", "./nothing", None, 7])
def test_hub_ids_stay_as_they_are_unless_they_are_streamed(name: Any) -> None:
    kwargs = {"revision": "main"}
    found, keywords = find_folder(name, kwargs)
    assert (found, keywords) == (name, kwargs)
    assert keywords is not kwargs  # which callers change


def test_a_url_becomes_a_folder_without_keywords_of_the_hub(server: RangeServer) -> None:
    url = f"{server.url}/models/llama"
    dropped = {"revision": "x", "token": "x", "cache_dir": "x", "force_download": True, "local_files_only": True}
    folder, kwargs = find_folder(url, {**dropped, "trust_remote_code": True, "attn_implementation": "eager"})
    assert kwargs == {"trust_remote_code": True, "attn_implementation": "eager"}
    assert is_stand_in(folder) and origin(folder) == url
    assert find_checkpoint(url) == folder


# -- the Hub -----------------------------------------------------------------------------------------------------------


def test_a_streamed_model_becomes_a_folder(hub: HubServer) -> None:
    folder, kwargs = find_folder("org/model", {"revision": "main", "dtype": "auto"}, stream=True)
    assert kwargs == {"dtype": "auto"}
    assert is_stand_in(folder) and origin(folder) == "org/model"
    assert hub.files is not None
    assert hub.files.stats()["bytes_sent"] <= 64 << 10
    assert find_checkpoint("org/model") == folder


@pytest.mark.parametrize("name", ["org/model", "org/sharded"])
def test_a_streamed_model_that_the_cache_holds_is_read_from_there(name: str, hub: HubServer) -> None:
    huggingface_hub.snapshot_download(name)
    hub.reset()
    assert find_folder(name, {}, stream=True) == (name, {})
    assert find_folder(name, {"revision": COMMIT}, stream=True) == (name, {"revision": COMMIT})
    assert hub.stats()["requests"] == 0


def test_a_model_of_which_the_cache_lacks_a_file_is_streamed(hub: HubServer) -> None:
    huggingface_hub.snapshot_download("org/sharded", ignore_patterns=["model-00002-*"])
    folder, _ = find_folder("org/sharded", {}, stream=True)
    assert is_stand_in(folder)


def test_another_cache_is_another_matter(hub: HubServer, tmp_path: Path) -> None:
    huggingface_hub.snapshot_download("org/model", cache_dir=tmp_path / "another")
    kwargs = {"cache_dir": tmp_path / "another"}
    assert find_folder("org/model", kwargs, stream=True) == ("org/model", kwargs)
    assert is_stand_in(find_folder("org/model", {}, stream=True)[0])


def test_who_may_not_ask_the_hub_does_not(hub: HubServer) -> None:
    kwargs = {"local_files_only": True}
    assert find_folder("org/model", kwargs, stream=True) == ("org/model", kwargs)
    with pytest.MonkeyPatch.context() as changed:  # `hub` puts back what was there before it
        changed.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert find_folder("org/model", {}, stream=True) == ("org/model", {})
    assert hub.stats()["requests"] == 0


# -- transformers ------------------------------------------------------------------------------------------------------


def test_any_from_pretrained_takes_the_folder_of_a_url(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "with-tokenizer")
    Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "with-tokenizer" / "tokenizer.json"))
    (tmp_path / "with-tokenizer/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with range_server({"models/llama": tmp_path / "with-tokenizer"}) as found:
        folder = local_folder(f"{found.url}/models/llama")
        config, ordinary = AutoConfig.from_pretrained(folder), AutoConfig.from_pretrained(str(llama))
        # A configuration names where it is from.
        assert {**config.to_dict(), "_name_or_path": ""} == {**ordinary.to_dict(), "_name_or_path": ""}
        generation = GenerationConfig.from_pretrained(folder)
        assert generation.to_dict() == GenerationConfig.from_pretrained(str(llama)).to_dict()
        assert AutoTokenizer.from_pretrained(folder)("b")["input_ids"] == [1]
    assert local_folder("org/model") == "org/model"
    assert lowmem_load.local_folder is local_folder
