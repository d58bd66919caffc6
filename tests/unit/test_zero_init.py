"""A zero.Init around a load: without effect inside, in effect afterwards, and compared with what the load makes."""

from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero import partition_parameters as zero
from torch import nn

from lowmem_load.engines.parameters import is_partitioned
from lowmem_load.engines.zero3_target import refuse_other_zero_init, refuse_partitioned, zero_init_disabled
from lowmem_load.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("lone_process")

BF16 = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
SAME = {"dtype": torch.bfloat16, "device": "cpu", "world_size": 1}


class Failed(Exception):
    pass


def has_effect() -> bool:
    """Return whether modules are cut up and made in bf16, checking that it is both or neither."""
    made = nn.Linear(2, 2)
    effects = {is_partitioned(made.weight), torch.zeros(1).dtype == torch.bfloat16}
    [effect] = effects
    return effect


def make_inside() -> type[nn.Module]:
    """Make modules where zero.Init is set aside; return a class that was made there. Leave by an error."""
    with zero_init_disabled() as around:
        assert around.dtype == torch.bfloat16
        assert not has_effect()

        class Meanwhile(nn.Linear):
            def __init__(self) -> None:
                super().__init__(2, 2)

        assert not is_partitioned(Meanwhile().weight)
        with zero_init_disabled() as inner:  # a load inside a load
            assert inner is None
        assert not has_effect()
        raise Failed(Meanwhile)


def test_it_has_no_effect_inside_and_has_it_again_afterwards() -> None:
    before = (torch.empty, nn.Module.__init_subclass__, nn.Linear.__init__)
    with zero_init_disabled() as around:
        assert around is None
    with deepspeed.zero.Init(config_dict_or_path=BF16), deepspeed.zero.Init(config_dict_or_path=BF16):
        assert has_effect()
        with pytest.raises(Failed) as caught:
            make_inside()
        [meanwhile] = caught.value.args
        assert has_effect()
        assert is_partitioned(meanwhile().weight)
    assert not has_effect()
    assert not is_partitioned(meanwhile().weight)
    assert (torch.empty, nn.Module.__init_subclass__, nn.Linear.__init__) == before


def test_one_that_deepspeed_has_shut_down_stays_so() -> None:
    """As it does inside deepspeed.initialize."""
    with deepspeed.zero.Init(config_dict_or_path=BF16):
        zero.shutdown_init_context()
        with zero_init_disabled() as around:
            assert around is None
        assert not has_effect()
        zero.restore_init_context()
        assert has_effect()


@pytest.mark.parametrize(
    ("keywords", "difference", "text"),
    [
        ({}, {}, None),
        ({}, {"dtype": torch.float32}, "makes torch.bfloat16 parameters on cpu for 1 rank.* asks for torch.float32"),
        ({}, {"world_size": 2}, "for 1 rank.* on cpu for 2"),
        ({}, {"device": "nvme"}, "on cpu for 1 rank.* on nvme for 1"),
        ({"remote_device": "cpu"}, {"device": "cuda"}, "on cpu for 1 rank.* on cuda for 1"),
    ],
)
def test_one_that_makes_other_parameters_is_refused(
    keywords: dict[str, Any], difference: dict[str, Any], text: str | None
) -> None:
    with deepspeed.zero.Init(config_dict_or_path=BF16, **keywords), zero_init_disabled() as around:
        if text is None:
            refuse_other_zero_init(around, **SAME)
            return
        with pytest.raises(UnsupportedError, match=text):
            refuse_other_zero_init(around, **{**SAME, **difference})


def test_a_parameter_that_is_cut_up_already_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    refuse_partitioned(model)
    with deepspeed.zero.Init(config_dict_or_path=BF16):
        model.append(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match=r"1\.weight: was partitioned .* the __init__ of Sequential"):
        refuse_partitioned(model)
