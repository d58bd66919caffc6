"""The partitioner under offload_param to nvme: which error is whose, and whose folder is whose."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowmem_load.ds import partition
from lowmem_load.ds.partition import Partitioner
from lowmem_load.errors import ConfigError


def nvme(path: Path, **sections: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(path)}}, **sections}


class Op:
    """Stands for AsyncIOBuilder, with the outcome of its build."""

    error: Exception | None = None

    def load(self, **_: Any) -> None:
        if self.error is not None:
            raise self.error


class Swapper:
    elements_per_buffer = 1


class Init:
    """Stands for zero.Init: under nvme the real one needs libaio and a process group."""

    error: Exception | None = None

    def __init__(self, **_: Any) -> None:
        if self.error is not None:
            raise self.error
        self.param_swapper = Swapper()

    def __getattr__(self, name: str) -> None:
        return None


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for stand_in in (Op, Init):
        monkeypatch.setattr(stand_in, "error", None)
    monkeypatch.setattr(partition, "AsyncIOBuilder", Op)
    monkeypatch.setattr(partition, "Init", Init)


@pytest.mark.parametrize("error", [RuntimeError("Unable to JIT load"), ImportError("libaio.so.1: cannot open")])
def test_an_op_that_cannot_be_built_is_explained(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Op, "error", error)
    with pytest.raises(ConfigError, match=rf"async_io op: {error}; install libaio") as caught:
        Partitioner(nvme(tmp_path))
    assert caught.value.__cause__ is error


def test_other_errors_of_zero_init_are_not_blamed_on_libaio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA out of memory")
    monkeypatch.setattr(Init, "error", error)
    with pytest.raises(RuntimeError) as caught:
        Partitioner(nvme(tmp_path))
    assert caught.value is error


def test_gds_has_an_op_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Op, "error", RuntimeError("Unable to JIT load"))
    Partitioner(nvme(tmp_path, aio={"use_gds": True}))


def test_a_folder_is_one_live_model_s(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    first = Partitioner(nvme(tmp_path))
    with pytest.raises(ConfigError, match=f"nvme_path {os.path.realpath(tmp_path)} holds the weights of another model"):
        Partitioner(nvme(tmp_path / "link"))
    Partitioner(nvme(tmp_path, bf16={"enabled": True}))  # DeepSpeed has a folder for each dtype below nvme_path
    Partitioner(nvme(tmp_path / "other"))
    first.itself = first  # type: ignore[attr-defined]  as parameters and their methods are
    del first
    Partitioner(nvme(tmp_path))


@pytest.mark.parametrize("lost_bytes", [0, 1, 4000])
def test_a_swap_file_that_came_out_short_is_an_error(
    lost_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, where DeepSpeed reports success. The files are written here as its swapper writes them."""

    def swap_out(self: Swapper, parameters: list[Any]) -> None:
        for parameter in parameters:
            Path(self.get_path(parameter)).write_bytes(bytes(parameter.ds_tensor.nbytes - lost_bytes))

    def get_path(self: Swapper, parameter: Any, must_exist: bool = False) -> str:
        return str(tmp_path / f"{parameter.ds_id}.swp")

    monkeypatch.setattr(Swapper, "swap_out_and_release", swap_out, raising=False)
    monkeypatch.setattr(Swapper, "get_path", get_path, raising=False)
    partitioner = Partitioner(nvme(tmp_path))
    values = torch.zeros(1000)
    values.ds_numel = 1000  # type: ignore[attr-defined]
    partitioner._swapped.append(SimpleNamespace(ds_id=7, ds_tensor=values))  # type: ignore[arg-type]
    if lost_bytes:
        with pytest.raises(ConfigError, match=rf"7\.swp has {4000 - lost_bytes} bytes after 4000 were written to it"):
            partitioner.swap_out()
    else:
        partitioner.swap_out()
    partitioner.swap_out()  # nothing is left to be written
