"""What reading costs is what the environment says of it, and a plan states by what it was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_load import plan
from lowmem_load.errors import ConfigError
from lowmem_load.planning.cooperative import Sharing
from lowmem_load.planning.reads import ReadCost
from lowmem_load.read import mounts
from lowmem_load.stages.read_cost import drops_behind, read_cost, sharing, stated_block_bytes
from tests import builders
from tests.parity import BF16


def test_the_environment_comes_before_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_cost() == ReadCost()
    monkeypatch.setenv("LOWMEM_LOAD_READ_CALL_US", "1000")
    assert read_cost().call_s == 1e-3
    monkeypatch.setenv("LOWMEM_LOAD_READ_MB_PER_S", "200")
    assert read_cost().max_gap_bytes == 200_000


def test_storage_on_the_network_costs_more_unless_the_environment_says_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gaps go by the same cost: half a megabyte is read along where a call takes a millisecond."""
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"1 0 8:1 / / rw - xfs /dev/root rw\n2 1 0:5 / {tmp_path} rw - nfs4 s:/ rw,rsize=1048576\n")
    monkeypatch.setattr(mounts, "MOUNTS", mountinfo)
    here = builders.tiny_llama(tmp_path)
    found = plan(here, BF16, rank=0, world_size=2)
    assert found.read_cost == ReadCost(1e-3, 5e8, 1 << 20, "nfs4") and found.read_cost.max_gap_bytes == 500_000
    assert found.summary()["read_cost_origin"] == "nfs4"
    paths = [file.path for file in found.files]
    monkeypatch.setenv("LOWMEM_LOAD_READ_CALL_US", "25")
    assert read_cost(paths) == ReadCost(25e-6, 5e8, 1 << 20, "nfs4, LOWMEM_LOAD_READ_CALL_US")
    monkeypatch.setenv("LOWMEM_LOAD_READ_MB_PER_S", "5000")
    monkeypatch.setenv("LOWMEM_LOAD_BLOCK_BYTES", "4096")
    assert read_cost(paths).origin.split(", ")[2:] == ["LOWMEM_LOAD_READ_MB_PER_S", "LOWMEM_LOAD_BLOCK_BYTES"]
    assert (read_cost(paths).bytes_per_s, read_cost(paths).block_bytes) == (5e9, 4096)


@pytest.mark.parametrize("text", ["0", "-1", "fast", "nan"])
def test_what_is_no_positive_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWMEM_LOAD_READ_CALL_US", text)
    with pytest.raises(ConfigError, match=f"LOWMEM_LOAD_READ_CALL_US: the environment has {text!r}"):
        read_cost()


def test_who_reads_together_is_said_in_one_of_three_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sharing() is Sharing.AUTO
    for word in Sharing:
        monkeypatch.setenv("LOWMEM_LOAD_SHARE_READS", word.value)
        assert sharing() is word
    monkeypatch.setenv("LOWMEM_LOAD_SHARE_READS", "yes")
    with pytest.raises(
        ConfigError, match="LOWMEM_LOAD_SHARE_READS: the environment has 'yes', expected auto, off or on"
    ):
        sharing()


def test_blocks_are_those_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stated_block_bytes() == 0
    monkeypatch.setenv("LOWMEM_LOAD_BLOCK_BYTES", "1048576")
    assert (stated_block_bytes(), read_cost([str(tmp_path / "gone")]).block_bytes) == (1 << 20, 1 << 20)
    monkeypatch.setenv("LOWMEM_LOAD_BLOCK_BYTES", "1 MiB")
    with pytest.raises(ConfigError, match="LOWMEM_LOAD_BLOCK_BYTES: the environment has '1 MiB', expected a positive"):
        read_cost()


def test_the_page_cache_is_let_go_of_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not drops_behind()
    monkeypatch.setenv("LOWMEM_LOAD_DROP_BEHIND", "1")
    assert drops_behind()
    monkeypatch.setenv("LOWMEM_LOAD_DROP_BEHIND", "yes")
    with pytest.raises(ConfigError, match="LOWMEM_LOAD_DROP_BEHIND: the environment has 'yes', expected 0 or 1"):
        drops_behind()


def test_a_plan_goes_by_it_and_says_so(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWMEM_LOAD_READ_CALL_US", "7")
    found = plan(builders.tiny_llama(checkpoints), BF16, rank=0, world_size=2)
    assert found.read_cost == ReadCost(call_s=7e-6, origin="local, LOWMEM_LOAD_READ_CALL_US")
    assert found.summary()["read_call_s"] == 7e-6
