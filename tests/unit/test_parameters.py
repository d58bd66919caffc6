"""What DeepSpeed is asked about parameters and buffers; stand-ins have the attributes that ZeRO-3 hangs on one."""

from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import PartitionedParamStatus
from torch import nn

from lowmem_load.engines import partition, zero3_target
from lowmem_load.engines.parameters import partition_in_memory
from lowmem_load.engines.partition import HAS_AUTOEP, refuse_what_is_absent
from lowmem_load.engines.zero3_target import fp32_buffers, fp32_rules
from lowmem_load.errors import UnsupportedError


class Swapper:
    """Keeps one partition on "disk", and has so many buffers."""

    def __init__(self, num_buffers: int, in_flight: bool) -> None:
        self.num_buffers, self.in_flight, self.calls = num_buffers, in_flight, list[str]()

    def available_swap_in_buffers(self) -> int:
        return self.num_buffers

    def synchronize_reads(self) -> None:
        if self.in_flight:
            self.parameter.ds_tensor.status = PartitionedParamStatus.AVAILABLE

    def swap_in(self, parameters: list[Any], async_op: bool) -> None:
        assert not async_op
        self.calls.append("in")
        parameters[0].ds_tensor.fill_(7.0)

    def remove_partition_and_release_buffers(self, parameters: list[Any]) -> None:
        self.calls.append("released")


def swapped(num_buffers: int, in_flight: bool = False) -> Any:
    """As a ZeRO-3 parameter of 4 elements on two ranks, whose partition is on nvme."""
    cut: Any = nn.Parameter(torch.empty(0))
    cut.ds_id, cut.ds_numel, cut.ds_tensor = 0, 4, torch.zeros(2)
    cut.ds_tensor.status, cut.nvme_swapper = PartitionedParamStatus.NOT_AVAILABLE, Swapper(num_buffers, in_flight)
    cut.nvme_swapper.parameter = cut
    return cut


def test_a_partition_on_nvme_is_read_for_the_block_if_there_is_a_buffer() -> None:
    cut = swapped(1)
    with partition_in_memory(cut, "x") as partition:
        assert partition.tolist() == [7.0, 7.0] and cut.nvme_swapper.calls == ["in"]
    assert cut.nvme_swapper.calls == ["in", "released"]
    on_its_way = swapped(0, in_flight=True)
    with partition_in_memory(on_its_way, "x"):
        assert on_its_way.nvme_swapper.calls == []
    with pytest.raises(UnsupportedError, match="x: its partition is on nvme"), partition_in_memory(swapped(0), "x"):
        pass


# -- buffers ---------------------------------------------------------------------------------------------------------


class Router(nn.Module):
    _keep_in_fp32_modules_strict = ("score_bias",)
    _keep_in_fp32_modules = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("score_bias", torch.zeros(2))
        self.register_buffer("scale", torch.zeros(2))
        self.register_buffer("score_bias_count", torch.zeros(2, dtype=torch.int64))


def model() -> nn.Module:
    other = nn.Module()
    other.register_buffer("score_bias", torch.zeros(2))  # not below a class that names it
    return nn.ModuleDict({"router": Router(), "other": other})


@pytest.mark.skipif(fp32_rules() is None, reason="this deepspeed keeps no buffers in fp32")
@pytest.mark.parametrize(
    ("setting", "dtype", "expected"),
    [
        (None, torch.bfloat16, ["router.score_bias"]),
        ("auto", torch.bfloat16, ["router.score_bias"]),
        (None, torch.float16, ["router.score_bias", "router.scale"]),
        (None, torch.float32, []),
        ([], torch.bfloat16, []),
        (["score_bias"], torch.bfloat16, ["router.score_bias", "other.score_bias"]),
        (["other.*bias"], torch.float16, ["other.score_bias"]),
        (["r*.sc*e$"], torch.bfloat16, ["router.scale"]),
    ],
)
def test_buffers_that_stay_in_fp32(setting: Any, dtype: torch.dtype, expected: list[str]) -> None:
    made = model()
    kept = {id(buffer) for buffer in fp32_buffers(made, setting, dtype)}
    assert [name for name, buffer in made.named_buffers() if id(buffer) in kept] == expected


def test_a_release_that_keeps_no_buffers_is_not_asked_for_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero3_target, "fp32_rules", lambda: None)
    assert fp32_buffers(model(), None, torch.bfloat16) == []
    assert fp32_buffers(model(), [], torch.bfloat16) == []
    with pytest.raises(UnsupportedError, match=r"data_types\.keep_in_fp32_modules: deepspeed \d\S+ would ignore it"):
        fp32_buffers(model(), ["score_bias"], torch.bfloat16)


# -- what a release of DeepSpeed does not have is refused by name ------------------------------------------------------


def test_a_setting_without_its_module_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is switched off."""
    monkeypatch.setattr(partition, "has", lambda asked: asked != HAS_AUTOEP)
    with pytest.raises(UnsupportedError, match=r"^expert_parallel\S*: deepspeed \d\S+ .*install deepspeed>=0.19.8$"):
        refuse_what_is_absent({"zero_optimization": {"stage": 3}, "expert_parallel": {"enabled": True}})
    for section in ({"enabled": False}, None):
        refuse_what_is_absent({"zero_optimization": {}, "expert_parallel": section})


@pytest.mark.parametrize("name", ["zero_quantized_weights", "zero_quantized_nontrainable_weights"])
def test_a_quantizer_that_the_cpu_lacks_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name}: DeepSpeed's quantizer is a CUDA kernel"):
        refuse_what_is_absent({"zero_optimization": {name: True}})
