"""Index files are untrusted: one that is malformed, or points outside of its folder, is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowmem_load.errors import CheckpointError
from lowmem_load.formats.index import check_indexes


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/secret", "a/../../secret", 7, None])
def test_an_index_may_not_point_outside(tmp_path: Path, file: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "model-1.safetensors", "b.weight": file}}))
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json: tensor 'b.weight' is said to be in"):
        check_indexes(str(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', "{"])
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        check_indexes(str(tmp_path))
