"""Commits of the Hub: what a name stands for is asked once."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import transformers.models.auto.auto_factory as auto_factory

from lowmem_load.hf.hub_files import commit_in, commit_of, find_adapter_as_asked, pinned_commit
from lowmem_load.replaced import replaced
from tests.hub import hub
from tests.remote.hub_front import COMMIT

OTHER = "f" * 40


@pytest.mark.parametrize(
    ("path", "commit"),
    [
        (f"/cache/models--org--m/snapshots/{COMMIT}/model.safetensors", COMMIT),
        (f"/cache/models--org--m/snapshots/{COMMIT}/sub/model.safetensors", COMMIT),
        (f"/data/snapshots/{COMMIT}/model.safetensors", ""),
        ("/cache/models--org--m/snapshots/main/model.safetensors", ""),
        ("/data/model.safetensors", ""),
    ],
)
def test_the_commit_of_a_file(path: str, commit: str) -> None:
    assert commit_in(path) == commit


class Resolved(str):
    __slots__ = ()
    resolved = COMMIT


@pytest.mark.parametrize(
    ("revision", "commit"), [(COMMIT, COMMIT), (Resolved("main"), COMMIT), ("main", ""), (None, ""), (COMMIT[:7], "")]
)
def test_the_commit_that_is_asked_for(revision: Any, commit: str) -> None:
    assert pinned_commit({"revision": revision}) == commit
    assert pinned_commit({}) == ""


def test_a_name_is_asked_for_once(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", {"cache_dir": str(tmp_path / "cache")}
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with hub(model, "org/model") as asked:
        assert commit_of("org/model", cache) == COMMIT
        asked.clear()
        assert commit_of("org/model", {**cache, "revision": "main"}) == COMMIT
        assert asked.count("HEAD config.json") == 1
        assert commit_of("org/model", {**cache, "revision": COMMIT}) == COMMIT
        assert asked.count("HEAD config.json") == 1
        assert {*asked} <= {"HEAD config.json", "HEAD adapter_config.json"}, "older releases ask for adapters each time"
        assert commit_of("org/absent", cache) == ""
    assert commit_of("org/model", cache) == COMMIT, "offline it is what the cache says"
    assert commit_of(str(model), {}) == ""


def test_an_adapter_has_no_commit_for_its_base_model(tmp_path: Path) -> None:
    model, cache = tmp_path / "adapter", {"cache_dir": str(tmp_path / "cache")}
    model.mkdir()
    for file in ("config.json", "adapter_config.json"):
        (model / file).write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    with hub(model, "org/adapter"):
        assert commit_of("org/adapter", cache) == ""


def test_adapters_are_looked_for_where_their_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        auto_factory, "find_adapter_config_file", lambda name, **keywords: calls.append((name, keywords))
    )
    kwargs = {"cache_dir": "/cache", "subfolder": "sub", "revision": "main"}
    with replaced(find_adapter_as_asked("org/model", kwargs)):
        auto_factory.find_adapter_config_file("org/model", revision=COMMIT)
        auto_factory.find_adapter_config_file("org/model", cache_dir="/own")
        auto_factory.find_adapter_config_file("org/other")
        other = threading.Thread(target=auto_factory.find_adapter_config_file, args=["org/model"])
        other.start()
        other.join()
    auto_factory.find_adapter_config_file("org/model")
    in_cache = {"cache_dir": "/cache", "revision": COMMIT}
    own = {"cache_dir": "/own"}
    assert calls == [
        ("org/model", in_cache),
        ("org/model", own),
        ("org/other", {}),
        ("org/model", {}),
        ("org/model", {}),
    ]
