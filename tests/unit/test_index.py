"""Index files are untrusted: one that is malformed, or points outside of its folder, is refused by name, if it is used.

So are configurations of adapters.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lowmem_load import load_model
from lowmem_load.errors import CheckpointError
from lowmem_load.files.index import MAX_JSON_NBYTES, base_of_adapter, check_index, check_model_config
from tests import builders

INDEX = "model.safetensors.index.json"
BF16 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


def write(folder: Path, weight_map: dict[str, Any], name: str = INDEX) -> str:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return str(folder / name)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        *((file, "outside of the folder") for file in ("../secret.safetensors", "/etc/secret", "a/../../secret")),
        *((file, "not a name of a file") for file in (7, None, ["model-1.safetensors"], "", "model\0.bin", "\ud800")),
    ],
)
def test_an_index_may_not_point_outside(tmp_path: Path, file: object, message: str) -> None:
    index = write(tmp_path, {"a.weight": "model-1.safetensors", "b.weight": file})
    with pytest.raises(CheckpointError, match=rf"{INDEX}: tensor 'b.weight' is said to be in .*{message}"):
        check_index(index)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"weight_map": []}', '{"weight_map": {"a": "b"}}', "[" * 100_000, "\ufeff{}"]
)
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"{INDEX}: (has no|is not JSON)"):
        check_index(str(tmp_path / INDEX))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, MAX_JSON_NBYTES + 1)


def dangling(path: Path) -> None:
    path.symlink_to("absent")


@pytest.mark.parametrize("reads", [check_index, base_of_adapter])
@pytest.mark.parametrize(
    ("make", "message"), [(endless, "is not a regular file"), (huge, "has 67108865 bytes, expected at most 67108864")]
)
def test_anything_but_a_regular_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], None], message: str, reads: Callable[[str], object]
) -> None:
    make(tmp_path / "file.json")
    with pytest.raises(CheckpointError, match=f"file.json: {message}"):
        reads(str(tmp_path / "file.json"))


@pytest.mark.parametrize("text", ["[]", "{}", '{"base_model_name_or_path": ""}', '{"base_model_name_or_path": 7}'])
def test_an_adapter_must_name_its_base(tmp_path: Path, text: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: lacks a base_model_name_or_path"):
        base_of_adapter(str(tmp_path / "adapter_config.json"))


# -- which index is used ---------------------------------------------------------------------------------------------


def malformed(path: Path) -> None:
    path.write_text("{")


def traversal(path: Path) -> None:
    write(path.parent, {"w": "../../secret"}, path.name)


@pytest.fixture
def checkpoint(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards with an index, one file without, and shards of a variant."""
    root = tmp_path_factory.mktemp("checkpoints")
    target = tmp_path / "checkpoint"
    shutil.copytree(builders.tiny_llama(root, max_shard_size="20KB"), target)
    shutil.copy(builders.tiny_llama(root) / "model.safetensors", target / "model.safetensors")
    index = json.loads((target / INDEX).read_text())
    (target / "model.safetensors.index.fp16.json").write_text(json.dumps(index))
    return target


@pytest.mark.usefixtures("lone_process")
@pytest.mark.parametrize("make", [malformed, traversal, fifo, endless, folder, dangling])
def test_an_unused_index_is_not_checked(checkpoint: Path, make: Callable[[Path], None]) -> None:
    """The one file comes first; a variant has an index of its own. An ordinary load takes them too."""
    (checkpoint / INDEX).unlink()
    make(checkpoint / INDEX)
    make(checkpoint / "pytorch_model.bin.index.json")
    for kwargs in ({}, {"variant": "fp16"}):
        ordinary = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, **kwargs)
        model = load_model(checkpoint, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, **kwargs)
        for (name, value), expected in zip(model.named_parameters(), ordinary.parameters(), strict=True):
            assert torch.equal(value.cpu(), expected), name


@pytest.mark.usefixtures("lone_process")
@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize(
    ("make", "message"),
    [(malformed, "is not JSON"), (traversal, "outside of the folder"), (huge, "has 67108865 bytes")],
)
def test_an_index_that_is_used_is_checked(
    checkpoint: Path, make: Callable[[Path], None], message: str, variant: str | None
) -> None:
    (checkpoint / "model.safetensors").unlink()
    index = checkpoint / (INDEX if variant is None else "model.safetensors.index.fp16.json")
    index.unlink()
    make(index)
    with pytest.raises(CheckpointError, match=rf"{index.name}: .*{message}"):
        load_model(checkpoint, BF16, variant=variant)


# -- config.json -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", r"expected an object \{...\}, got \[\]"),
        ("null", r"expected an object \{...\}, got None"),
        ("{", "is not JSON"),
        ('{"a":' * 20_000, "is not JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"architectures": "LlamaForCausalLM"}', "architectures: expected a list of class names, got 'LlamaForC"),
        ('{"architectures": [7]}', r"architectures: expected a list of class names, got \[7\]"),
        ('{"architectures": [""]}', r"architectures: expected a list of class names, got \[''\]"),
        ('{"num_hidden_layers": 1000000000000}', "num_hidden_layers: expected 0 to 16384, got 1000000000000"),
        ('{"num_hidden_layers": -1}', "num_hidden_layers: expected 0 to 16384, got -1"),
        ('{"n_layer": 1e400, "text_config": {"num_experts": 10000000}}', "num_experts: expected 0 to 16384"),
        ('{"depths": [2, 2, 10000000]}', "depths: expected -16384 to 16384, got 10000000"),
        ('{"num_labels": 1000000000000}', "num_labels: expected 0"),
    ],
)
def test_impossible_counts_in_a_config_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=f"{path}: {message}") as caught:
        check_model_config(str(path))
    assert len(str(caught.value)) < 1000


def test_other_config_values_are_left_to_transformers(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    values = {"vision_feature_layer": -2, "rope_theta": 10**12, "num_hidden_layers": None, "architectures": None}
    path.write_text(json.dumps({**values, "hidden_size": "8", "num_channels": -1}))
    check_model_config(str(path))
