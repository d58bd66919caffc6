"""What takes the place of copies and threads in transformers' loader gives the loader what it had."""

from __future__ import annotations

import copy

import pytest

from lowmem_load.hf.collecting import described_collecting

loading = pytest.importorskip("transformers.core_model_loading", reason="transformers before 5 has no such loader")


def converter() -> object:
    return loading.WeightConverter("experts.*.up", "experts.up", [loading.MergeModulelist(0)])


def test_a_copy_that_has_collected_nothing_is_handed_out_again() -> None:
    one, other = converter(), converter()
    with described_collecting():
        first = loading.deepcopy(one)
        assert first is not one
        assert loading.deepcopy(one) is first
        assert loading.deepcopy(other) is not first
        first.add_tensor("model.experts.up", "experts.0.up", "experts.*.up", list)
        second = loading.deepcopy(one)
        assert second is not first
        assert second.collected_tensors == one.collected_tensors == {}
        assert first.materialize_tensors() == {"experts.*.up": [[]]}  # what the job gives when it is called


def test_other_values_are_copied_as_ever() -> None:
    with described_collecting():
        value = [[1]]
        copied = loading.deepcopy(value)
        assert copied == value
        assert copied[0] is not value[0]


def test_jobs_are_given_back_and_nothing_stays() -> None:
    before = loading.deepcopy, loading.ThreadPoolExecutor
    with described_collecting():
        pool = loading.ThreadPoolExecutor(max_workers=4)
        job = pool.submit(list)
        assert job is list
        pool.shutdown(wait=False, cancel_futures=True)
    assert (loading.deepcopy, loading.ThreadPoolExecutor) == before
    assert loading.deepcopy is copy.deepcopy
