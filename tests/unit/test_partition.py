"""The partitioner under offload_param to nvme: which error is whose, and whose folder is whose."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from torch import nn

from lowmem_load.engines import partition
from lowmem_load.engines.partition import Partitioner, Swapping
from lowmem_load.engines.zero3_target import fp32_rules
from lowmem_load.errors import ConfigError


def nvme(path: Path, **sections: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(path)}}, **sections}


class Swapper:
    elements_per_buffer = 1
    param_buffer_count = 5
    swap_element_size = 2
    swap_folder = "/nvme/rank0"
    lost_bytes = 0

    def __init__(self, folder: str = "") -> None:
        self.folder, self.free = folder, list(range(self.param_buffer_count))
        self.done, self.writing = list[str](), list[Any]()

    def swappable_tensor(self, numel: int) -> bool:
        return numel >= 100

    def _io_aligned_numel(self, numel: int) -> int:
        return -(-numel // 64) * 64

    def available_swap_in_buffers(self) -> int:
        return len(self.free)

    def get_buffer(self, parameter: Any, numel: int) -> torch.Tensor:
        parameter.buffer_id = self.free.pop()
        return torch.zeros(numel)

    def swap_out_and_release(self, parameters: list[Any], *, async_op: bool, force_buffer_release: bool) -> None:
        assert async_op and force_buffer_release and not self.writing
        self.writing = parameters
        self.done.append(f"write {[parameter.ds_id for parameter in parameters]}")

    def synchronize_writes(self) -> None:
        for parameter in self.writing:
            Path(self.get_path(parameter)).write_bytes(bytes(parameter.ds_tensor.nbytes - self.lost_bytes))
        self.free += [parameter.buffer_id for parameter in self.writing]
        self.done.append(f"written {[parameter.ds_id for parameter in self.writing]}")
        self.writing = []

    def get_path(self, parameter: Any, must_exist: bool = False) -> str:
        return f"{self.folder}/{parameter.ds_id}.swp"


class Init:
    """Stands for zero.Init: under nvme the real one needs libaio and a process group."""

    def __init__(self, **_: Any) -> None:
        self.param_swapper = Swapper()

    def get_partition_rank(self) -> int:
        return 0

    def __getattr__(self, name: str) -> None:
        return None


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "load_async_io", lambda: None)
    monkeypatch.setattr(partition, "DeepSpeedConfig", lambda *_: None)  # the real one wants a GPU for GDS
    monkeypatch.setattr(partition, "Init", Init)


@pytest.mark.parametrize("error", [RuntimeError("Unable to JIT load"), ImportError("libaio.so.1: cannot open")])
def test_an_op_that_cannot_be_built_is_explained(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "load_async_io", raising(error))
    with pytest.raises(ConfigError, match=rf"async_io op: {error}; install libaio") as caught:
        Partitioner.from_config(nvme(tmp_path))
    assert caught.value.__cause__ is error


def test_other_errors_of_zero_init_are_not_blamed_on_libaio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA out of memory")
    monkeypatch.setattr(partition, "Init", raising(error))
    with pytest.raises(RuntimeError) as caught:
        Partitioner.from_config(nvme(tmp_path))
    assert caught.value is error


def test_gds_has_an_op_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "load_async_io", raising(RuntimeError("Unable to JIT load")))
    Partitioner.from_config(nvme(tmp_path, aio={"use_gds": True}))


def test_ids_are_reserved_in_the_order_in_which_zero_init_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As each module's `__init__` returns: the parameters of its children come first; shared ones are counted once."""
    monkeypatch.setattr(Init, "param_id", 5, raising=False)
    shared = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    whole = nn.Sequential(nn.Embedding(3, 2), shared, nn.ModuleDict({"again": shared, "last": nn.Linear(2, 3)}))
    whole[2]["last"].weight = whole[0].weight
    whole[1].register_parameter("absent", None)
    whole[2]["again"].register_module("nobody", None)
    whole.register_parameter("own", nn.Parameter(torch.zeros(1)))
    ids = Partitioner.from_config(nvme(tmp_path)).reserve_ids(whole)
    names = ["0.weight", "1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias", "2.last.bias", "own"]
    assert ids == {id(whole.get_parameter(name)): 5 + number for number, name in enumerate(names)}
    assert Init.param_id == 5 + len(names)


def swapping_into(folder: Path) -> tuple[Swapping, Swapper]:
    swapper = Swapper(str(folder))
    return Swapping(swapper, (str(folder), "")), swapper


def fill(swapping: Swapping, ds_id: int) -> None:
    """Gives a parameter a buffer, as `Partitioner.allocate` does for real ones."""
    parameter: Any = SimpleNamespace(ds_id=ds_id, dtype=torch.float32)
    parameter.ds_tensor = swapping.buffer(parameter, 1)
    parameter.ds_tensor.ds_numel = 1


@pytest.mark.parametrize(
    ("num_buffers", "batches", "num_meanwhile"),
    [
        (1, [[0], [1], [2], [3], [4], [5], [6]], 0),
        (2, [[0], [1], [2], [3], [4], [5], [6]], 6),
        (5, [[0, 1, 2], [3, 4], [5, 6]], 4),
    ],
)
def test_some_buffers_are_filled_while_others_are_written(
    num_buffers: int, batches: list[Any], num_meanwhile: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Swapper, "param_buffer_count", num_buffers)
    partitions, swapper = swapping_into(tmp_path)
    meanwhile = 0
    for ds_id in range(7):
        if partitions.is_swap_due:
            partitions.swap_out()
        meanwhile += bool(swapper.writing)
        fill(partitions, ds_id)
    partitions.finish()
    assert [text for text in swapper.done if "write " in text] == [f"write {batch}" for batch in batches]
    assert sorted(swapper.free) == list(range(num_buffers))
    assert meanwhile == num_meanwhile


@pytest.mark.parametrize("lost_bytes", [0, 1, 4])
def test_a_swap_file_that_came_out_short_is_an_error(
    lost_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, where DeepSpeed reports success."""
    monkeypatch.setattr(Swapper, "lost_bytes", lost_bytes)
    partitions, swapper = swapping_into(tmp_path)
    fill(partitions, 7)
    if lost_bytes:
        with pytest.raises(ConfigError, match=rf"7\.swp has {4 - lost_bytes} bytes after 4 were written to it"):
            partitions.finish()
    else:
        partitions.finish()
    partitions.finish()  # nothing is left to be written
    assert swapper.done == ["write [7]", "written [7]"]


def test_what_will_be_swapped_is_known_before(tmp_path: Path) -> None:
    """What is too small for the swapper stays in memory; what goes to a file is padded."""
    partitions, _ = swapping_into(tmp_path)
    assert partitions.files([99, 100, 128, 129, 0]) == {"/nvme/rank0": 2 * (128 + 128 + 192)}
    assert partitions.files([]) == {"/nvme/rank0": 0}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"zero_optimization": {"stage": 3, "overlap_comm": "x"}}, ".*overlap_comm\\n *Input should be"),
        ({"zero_optimization": {"stage": 3, "sub_group_siz": 1}}, r".*sub_group_siz\n *Extra inputs are not"),
        ({"flops_profiler": 7}, ""),
        ({"activation_checkpointing": []}, ""),
        ({"sparse_attention": "x"}, ""),
        ({"fp16": {"enabled": True, "loss_scale": "x"}}, ".*DeepSpeedFP16Config\\nloss_scale"),
        ({"train_batch_size": 3}, "AssertionError: "),
        pytest.param(
            {"data_types": {"keep_in_fp32_modules": 7}},
            "DeepSpeedConfigError: data_types",
            marks=pytest.mark.skipif(fp32_rules() is None, reason="this deepspeed keeps no buffers in fp32"),
        ),
    ],
)
def test_what_deepspeed_refuses_is_an_error_of_ours(
    section: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "DeepSpeedConfig", DeepSpeedConfig)
    config = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2, **section}
    with pytest.raises(ConfigError, match=rf"(?s)deepspeed [\d.]+ refuses the ds_config: {message}") as caught:
        Partitioner.from_config(config)
    assert caught.value.__cause__ is not None and "errors.pydantic.dev" not in str(caught.value)
