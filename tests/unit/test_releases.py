"""What a release of DeepSpeed does not have is refused by name, whichever is installed."""

from __future__ import annotations

from typing import Any

import pytest

from lowmem_load.ds import partition
from lowmem_load.ds.partition import HAS_AUTOCAST, HAS_AUTOEP, HAS_MICS, refuse_what_is_absent
from lowmem_load.errors import UnsupportedError

SETTINGS: dict[str, dict[str, Any]] = {
    HAS_MICS: {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    HAS_AUTOCAST: {"zero_optimization": {"stage": 3}, "torch_autocast": {"enabled": True}},
    HAS_AUTOEP: {"zero_optimization": {"stage": 3}, "expert_parallel": {"enabled": True}},
}


@pytest.mark.parametrize(
    ("module", "name"),
    list(zip(SETTINGS, ("mics_shard_size", "torch_autocast", "expert_parallel"), strict=True)),
)
def test_a_setting_without_its_module_is_refused_by_name(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "has", lambda asked: asked != module)
    with pytest.raises(UnsupportedError, match=rf"^{name}\S*: deepspeed \d\S+ .*install another release$"):
        refuse_what_is_absent(SETTINGS[module])
    for other in SETTINGS.keys() - {module}:
        refuse_what_is_absent(SETTINGS[other])


def test_what_is_switched_off_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "has", lambda _: False)
    refuse_what_is_absent({"zero_optimization": {"stage": 3, "mics_shard_size": -1}})
    refuse_what_is_absent({"zero_optimization": {}, "torch_autocast": {"enabled": False}})
    refuse_what_is_absent({"zero_optimization": {}, "torch_autocast": None})


def test_a_module_is_found_without_its_import() -> None:
    assert partition.has("deepspeed.runtime.zero.stage3")
    assert not partition.has("deepspeed.runtime.zero.stage4")
