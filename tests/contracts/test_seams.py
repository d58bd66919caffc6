"""The seams notice at import when DeepSpeed or transformers is not what they were written for."""

from __future__ import annotations

import pytest
import transformers
from deepspeed.runtime import keep_in_fp32, lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import partition_parameters as pp
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from transformers import modeling_utils
from transformers.integrations import deepspeed as integration

from lowmem_load.ds import engine as zero3_engine
from lowmem_load.ds import partition as zero3
from lowmem_load.errors import IncompatibleVersionError
from lowmem_load.hf import loader as hf


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (pp.Init, "_convert_to_deepspeed_param"),
        (keep_in_fp32, "buffers_to_keep_in_fp32"),
        (pp.Init, "_partition_rank"),
        (pp.Init, "param_id"),
        (pp, "ZeroParamStatus"),
        (pp, "PartitionedParamStatus"),
    ],
)
def test_a_deepspeed_without_a_name_is_refused(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(IncompatibleVersionError, match=rf"lacks .*{name}.*; lowmem_load was written for deepspeed >=0"):
        zero3._check_contract()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (DeepSpeedEngine, "_zero3_consolidated_16bit_state_dict"),
        (DeepSpeedZeroOptimizer_Stage3, "_get_norm_groups"),
        (PartitionedParameterCoordinator, "reset_step"),
        (lr_schedules, "VALID_LR_SCHEDULES"),
    ],
)
def test_an_engine_without_a_name_is_refused(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(IncompatibleVersionError, match=rf"lacks .*{name}.*; lowmem_load was written for deepspeed >=0"):
        zero3_engine._check_contract()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (modeling_utils, "safe_open"),
        (integration, "_hf_deepspeed_config_weak_ref"),
        (integration, "HfDeepSpeedConfig"),
        (transformers.PreTrainedModel, "from_pretrained"),
    ],
)
def test_a_transformers_without_a_name_is_refused(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    with pytest.raises(IncompatibleVersionError, match=rf"lacks .*{name}.*; lowmem_load was written for transformers"):
        hf._check_contract()


def test_the_installed_versions_are_accepted() -> None:
    zero3._check_contract()
    zero3_engine._check_contract()
    hf._check_contract()
