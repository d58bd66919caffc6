"""Training checkpoints in object stores: read as those on a disk are, by ranges, and what is wrong there is named."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from lowmem_load import consolidate
from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.load.request import weights_folder
from lowmem_load.training_checkpoints.open_model import open_model
from lowmem_load.training_checkpoints.zero_checkpoint import find_folder
from tests.multi_rank.test_save import equal_folders
from tests.remote.answering import assert_no_secrets
from tests.remote.range_server import RangeServer
from tests.unit.test_dcp import TENSORS, dated, rank_file
from tests.zero_checkpoint import save_zero3

RUN = "s3://bucket/run"
WEIGHTS = {"a.weight": torch.arange(35.0).view(7, 5), "b": torch.arange(70_000.0)}


@pytest.fixture
def run(store: RangeServer, stored_file: Path) -> Path:
    """The folder of `RUN`, which is not there yet."""
    return stored_file.parents[2] / "run"


def save_dcp(run: Path) -> None:
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": TENSORS}, storage_writer=dcp.FileSystemWriter(run, thread_count=2), no_dist=True)


def save_as_accelerate(run: Path) -> None:
    save_dcp(run / "pytorch_model_fsdp_0")


def save_ranks(run: Path) -> None:
    for rank in range(2):
        rank_file(run, rank, WEIGHTS)


def save_zero(run: Path) -> None:
    save_zero3(run, WEIGHTS, world_size=2, sub_group_size=300, moments={"exp_avg": WEIGHTS}, steps=5)
    save_zero3(run / "other", WEIGHTS, world_size=1)


def save_swapped(run: Path) -> None:
    save_zero3(run, WEIGHTS, world_size=2, swapped=True)


@pytest.mark.parametrize("save", [save_dcp, save_as_accelerate, save_ranks, save_zero, save_swapped])
def test_files_are_those_of_the_local_folder(save: Callable[[Path], None], run: Path, tmp_path: Path) -> None:
    save(run)
    consolidate(run, tmp_path / "local")
    report = consolidate(f"{RUN}/", tmp_path / "from-store")
    equal_folders(tmp_path / "from-store", tmp_path / "local")
    assert report.written_bytes > 0
    if save is save_zero:
        consolidate(RUN, tmp_path / "tag", tag="global_step5")
        equal_folders(tmp_path / "tag", tmp_path / "local")


def test_only_what_is_needed_is_requested(run: Path, store: RangeServer, tmp_path: Path) -> None:
    save_zero(run)
    (run / "global_step5" / "unrelated.bin").write_bytes(bytes(1 << 20))
    store.reset()
    consolidate(RUN, tmp_path / "made")
    needed = sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert needed < store.stats()["bytes_sent"] < needed + 100_000
    assert not any("unrelated" in asked or "other" in asked for asked in store.stats()["asked"])


# -- failures ----------------------------------------------------------------------------------------------------------


def error_of(act: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        act()
    assert_no_secrets(str(caught.value))
    assert "lowmem_load-" not in str(caught.value)  # the folder of stand-ins
    return str(caught.value)


def damaged(run: Path, harm: Callable[[Path], object], tmp_path: Path) -> str:
    shutil.rmtree(run, ignore_errors=True)
    save_dcp(run)
    harm(run)
    return error_of(lambda: consolidate(RUN, tmp_path / "made"))


def test_what_is_wrong_is_named_by_its_url(run: Path, store: RangeServer, tmp_path: Path) -> None:
    data = "__0_0.distcp"

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-100])

    assert f"{RUN}/{data}: is missing, with " in damaged(run, lambda at: (at / data).unlink(), tmp_path)
    assert f"{RUN}/{data}: has " in damaged(run, lambda at: cut(at / data), tmp_path)
    assert f"{RUN}/.metadata: its pickle" in damaged(run, lambda at: cut(at / ".metadata"), tmp_path)
    assert f"{RUN}: has .distcp files and no" in damaged(run, lambda at: (at / ".metadata").unlink(), tmp_path)
    assert f"{RUN}-not: no files are there" in error_of(lambda: consolidate(f"{RUN}-not", tmp_path / "made"))
    save_zero(run / "zero")
    (run / "zero" / "latest").write_text("global_step7")
    text = error_of(lambda: consolidate(f"{RUN}/zero", tmp_path / "made"))
    assert f"{RUN}/zero: has no checkpoint 'global_step7', which 'latest' names" in text
    for tag in ("..", "../x", ""):
        text = error_of(lambda tag=tag: consolidate(f"{RUN}/zero", tmp_path / "made", tag=tag))
        assert "which 'tag' names" in text
    store.set(gone=True, repeats=True)
    assert "the store refuses access" in error_of(lambda: consolidate(RUN, tmp_path / "made"))


def test_requests_are_made_again(run: Path, store: RangeServer, tmp_path: Path) -> None:
    save_zero(run)
    store.set(error_503=0.2, slow_down=0.1, reset_before=0.1)
    consolidate(RUN, tmp_path / "made")
    assert len(store.stats()["faults"]) == 3
    assert torch.equal(load_file(tmp_path / "made" / "model.safetensors")["b"], WEIGHTS["b"])


def test_a_file_that_is_replaced_meanwhile_is_an_error(run: Path, store: RangeServer) -> None:
    save_dcp(run)
    with Executor() as executor:
        model = open_model(RUN, executor)
        os.utime(run / "__0_0.distcp", (1, 1))
        with pytest.raises(CheckpointError, match=f"{RUN}/__0_0.distcp: was replaced after its header was read"):
            [read_whole(executor, tensor.whole) for tensor in model.tensors.values()]


@pytest.mark.parametrize(
    ("ages", "is_one"),
    [
        ((9, 8, 7), True),  # as it was saved
        ((900, 800, 7), True),  # ranks that wrote slowly
        ((9, 2, 7), True),  # uploaded in another order
        ((900, 0, 700), False),  # a later save was killed
    ],
)
def test_a_file_of_a_later_save_is_refused(ages: tuple[float, ...], is_one: bool, run: Path, tmp_path: Path) -> None:
    save_dcp(run)
    dated(run, dict(zip(("__0_0.distcp", "__0_1.distcp", ".metadata"), ages, strict=True)))
    if is_one:
        consolidate(RUN, tmp_path / "made")
    else:
        with pytest.raises(CheckpointError, match=f"{RUN}/.metadata: was written at .* upload them all again"):
            consolidate(RUN, tmp_path / "made")


def test_what_is_not_served_is_refused_by_name() -> None:
    for name in ("hf://user:secret-token@org/model", "file:///x", ""):
        with pytest.raises(ConfigError, match="expected the folder or URL of a training checkpoint") as caught:
            weights_folder(name)
        assert_no_secrets(str(caught.value))
    with pytest.raises(UnsupportedError, match=f"{RUN}: optimizer states are not read from stores") as refused:
        find_folder(RUN.replace("://", "://user-name:pass%2Fword@"), None)
    assert_no_secrets(str(refused.value))
