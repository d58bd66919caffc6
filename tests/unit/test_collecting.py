"""What takes the place of copies and threads in transformers' loader gives the loader what it had."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers.core_model_loading as loading

from lowmem_load.hf.collecting import collecting_handlers
from lowmem_load.replaced import replaced


def converter() -> object:
    return loading.WeightConverter("experts.*.up", "experts.up", [loading.MergeModulelist(0)])


def test_a_copy_that_has_collected_nothing_is_handed_out_again() -> None:
    one, other = converter(), converter()
    with replaced(collecting_handlers()):
        first = loading.deepcopy(one)
        assert first is not one
        assert loading.deepcopy(one) is first
        assert loading.deepcopy(other) is not first
        first.add_tensor("model.experts.up", "experts.0.up", "experts.*.up", list)
        second = loading.deepcopy(one)
        assert second is not first
        assert second.collected_tensors == one.collected_tensors == {}
        assert first.materialize_tensors() == {"experts.*.up": [[]]}  # what the job gives when it is called
        assert first.layer_targets == {"model.experts.up": {"experts.0.up"}}


def test_other_values_are_copied_as_ever() -> None:
    with replaced(collecting_handlers()):
        value = [[1]]
        copied = loading.deepcopy(value)
        assert copied == value
        assert copied[0] is not value[0]


def test_nothing_stays() -> None:
    one = converter()
    with replaced(collecting_handlers()):
        assert loading.deepcopy(one) is loading.deepcopy(one)
    assert loading.deepcopy(one) is not loading.deepcopy(one)


def test_a_job_makes_a_tensor_as_transformers_does_and_takes_little_memory() -> None:
    tensor = torch.arange(3.0)
    with replaced(collecting_handlers()):
        pool: Any = object()  # of which nothing is asked
        job = loading.spawn_materialize(pool, tensor, "cpu", torch.bfloat16)
        assert not hasattr(job, "__dict__")
        assert torch.equal(job(), loading._materialize_copy(tensor, "cpu", torch.bfloat16))
        assert job().dtype == torch.bfloat16


def test_a_job_that_shards_is_left_to_transformers() -> None:
    if "sharding_op" not in inspect.signature(loading.spawn_materialize).parameters:
        pytest.skip("this transformers shards by another function")

    class Halves:
        def shard_tensor(self, tensor: torch.Tensor, **_: object) -> torch.Tensor:
            return tensor[:1]

    with replaced(collecting_handlers()):
        job = loading.spawn_materialize(None, torch.zeros(2), sharding_op=Halves())
        assert job().shape == (1,)
