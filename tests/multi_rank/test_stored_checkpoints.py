"""Training checkpoints in object stores: any number of ranks reads them into both engines as from a disk."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from lowmem_load import CheckpointError, RankError, consolidate, get_load_report, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.files import object_store
from lowmem_load.load import load as loading
from tests import builders
from tests.model_digest import model_digest
from tests.multi_rank.test_save import FP32, equal_folders
from tests.multi_rank.test_training_checkpoints import model_of, sharded
from tests.ranks import run_ranks
from tests.remote import stores
from tests.remote.answering import assert_no_secrets
from tests.remote.range_server import FarServer
from tests.remote.upload_server import UploadServer
from tests.unit.conftest import S3
from tests.zero_checkpoint import save_zero3

RUN = "s3://bucket/run"
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "vocab_size": 2000}
"""Of a Llama whose weights are many more bytes than the heads of its files."""


def save(folders: dict[str, Path], root: Path) -> None:
    """Rank function: what two ranks save by torch DCP."""
    DistributedInterface()
    for name, folder in folders.items():
        dcp.save({"model": sharded(model_of(folder), (2,)).state_dict()}, checkpoint_id=root / f"{name}-dcp")


@pytest.fixture(scope="module")
def saved(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Path], Path]:
    """The folders of the models, and one with what two ranks have saved of them: bucket/run."""
    llama = builders.tiny_llama(checkpoints, torch.float32, **SIZES)
    folders = {"llama": llama, "experts": builders.tiny_qwen3_moe(checkpoints, torch.float32)}
    root = tmp_path_factory.mktemp("stored") / "bucket" / "run"
    run_ranks(save, folders, root, world_size=2, timeout_s=180)
    for name, folder in folders.items():
        values = {key: value.detach() for key, value in model_of(folder).named_parameters()}
        save_zero3(root / f"{name}-zero", values, world_size=2)
        shutil.copyfile(folder / "config.json", root / f"{name}-zero" / "config.json")
    return folders, root


def read_all(folders: dict[str, Path], root: Path, url: str, made: Path) -> dict[str, float]:
    """Rank function: loads from the store and from the disk; returns which share of the weights this rank fetched."""
    ranks, shares = DistributedInterface(), dict[str, float]()
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    for name, folder in folders.items():
        nbytes = sum(value.numel() * 4 for value in model_of(folder).parameters())
        for kind in ("dcp", "zero"):
            local, stored = root / f"{name}-{kind}", f"{url}/{name}-{kind}"
            expected = model_digest(load_model(folder, FP32, weights_from=local))
            model = load_model(folder, FP32, weights_from=stored)
            assert model_digest(model) == expected, stored
            shares[f"{name}-{kind}"] = get_load_report(model).requests.received_bytes / nbytes
            cut, other = (load_model(folder, mesh=mesh, dtype=torch.float32, weights_from=at) for at in (stored, local))
            values = other.state_dict()
            assert all(torch.equal(each.to_local(), values[key].to_local()) for key, each in cut.state_dict().items())
        consolidate(f"{url}/{name}-zero", f"{url}/made-{name}-{ranks.world_size}", ranks=ranks)
        consolidate(root / f"{name}-zero", made / f"made-{name}-{ranks.world_size}", ranks=ranks)
    return shares


@contextlib.contextmanager
def serving(root: Path) -> Iterator[UploadServer]:
    with contextlib.closing(UploadServer({"bucket": root.parent})) as server:
        yield server


@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.release) for size in (1, 4))])
def test_ranks_read_what_they_read_from_a_disk(
    world_size: int, saved: tuple[dict[str, Path], Path], tmp_path: Path
) -> None:
    folders, root = saved
    with serving(root) as server:
        env = {**S3, "AWS_ENDPOINT_URL": server.url, "TMPDIR": str(tmp_path)}
        found = run_ranks(read_all, folders, root, RUN, tmp_path, world_size=world_size, timeout_s=240, env=env)
    for shares in found:
        of_llama = {kind: share for kind, share in shares.items() if kind.startswith("llama")}
        assert max(of_llama.values()) < 1 / world_size + 0.05, of_llama
    for name in folders:
        equal_folders(root / f"made-{name}-{world_size}", tmp_path / f"made-{name}-{world_size}")


def fail(folder: Path, root: Path, url: str) -> None:
    """Rank function: what goes wrong in the middle is one error on all ranks."""
    DistributedInterface()
    rank, ordinary = dist.get_rank(), loading.agree_on_bytes

    def error_of(harm: Callable[[], object], url: str = url) -> str:
        def harming(*args: Any, **kwargs: Any) -> Any:
            if rank == 0:
                harm()
            dist.barrier()
            return ordinary(*args, **kwargs)

        raised = pytest.raises((RankError, CheckpointError))
        with mock.patch.object(loading, "agree_on_bytes", harming), raised as caught:
            load_model(folder, FP32, weights_from=url)
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(caught.value))
        assert len(set(texts)) == 1, texts
        assert_no_secrets(texts[0])
        return str(texts[0])

    def each(act: Callable[[Path], object]) -> Callable[[], object]:
        return lambda: [act(path) for path in root.rglob("*.distcp")]

    def nothing() -> None:
        pass

    object_store.PATIENCE_S = 1.5
    whole = {path: path.read_bytes() for path in root.rglob("*.distcp")}
    ask = FarServer(os.environ["AWS_ENDPOINT_URL"])
    assert "cannot be read: " in error_of(lambda: ask.set(error_503=1))
    dist.barrier()
    ask.set(error_503=0)
    assert ".distcp: was replaced after" in error_of(each(os.utime))
    assert ".distcp: was replaced after" in error_of(each(lambda path: path.write_bytes(path.read_bytes()[:-5000])))
    text = error_of(nothing)
    assert f"{url}/__" in text and ".distcp: has " in text
    if rank == 0:
        [path.write_bytes(content) for path, content in whole.items()]
    dist.barrier()
    assert ".distcp: is not there" in error_of(each(Path.unlink))
    assert f"{url}/__0_0.distcp: is missing, with " in error_of(nothing)
    assert f"{url}-not: no files are there" in error_of(nothing, f"{url}-not")


def test_what_goes_wrong_is_one_error_on_all_ranks(saved: tuple[dict[str, Path], Path], tmp_path: Path) -> None:
    folders, root = saved
    shutil.copytree(root / "llama-dcp", tmp_path / "bucket" / "run")
    with serving(tmp_path / "bucket" / "run") as server:
        env = {**S3, "AWS_ENDPOINT_URL": server.url}
        run_ranks(fail, folders["llama"], tmp_path / "bucket" / "run", RUN, world_size=2, timeout_s=240, env=env)


@pytest.mark.release
@pytest.mark.parametrize(("begin", "program"), [(stores.s3, stores.MOTO), (stores.azure, stores.AZURITE)])
def test_real_stores_serve_what_a_disk_does(
    begin: Callable[[], contextlib.AbstractContextManager[stores.Server]],
    program: Path,
    saved: tuple[dict[str, Path], Path],
    tmp_path: Path,
) -> None:
    if not program.exists():
        pytest.skip("not installed by `make test-stores`")
    folders, root = saved
    with begin() as found:
        url = found.upload(root, "run")
        run_ranks(read_all, folders, root, url, tmp_path, world_size=2, timeout_s=240, env=found.environment)
        for name in folders:
            found.download(f"run/made-{name}-2", tmp_path / "downloaded" / name)
            equal_folders(tmp_path / "downloaded" / name, tmp_path / f"made-{name}-2")
