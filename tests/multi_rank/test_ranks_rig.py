"""run_ranks itself: results in order, failures reported with their cause, hangs caught."""

import os
import time

import pytest

from tests.ranks import RankFailure, run_ranks


def _identity(tag):
    return (tag, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.getpid())


def _sum_of_ranks():
    import deepspeed
    import torch

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    value = torch.tensor([float(os.environ["RANK"]) + 1])
    torch.distributed.all_reduce(value)
    return value.item(), torch.get_num_threads()


def _fail_on_rank_1():
    if os.environ["RANK"] == "1":
        print("said before failing", flush=True)
        raise ValueError("the cause is here")
    time.sleep(600)


def _assert_on_rank_1(read):
    assert read == list(range(100)) or os.environ["RANK"] == "0", "what was read"


def _die_on_rank_0():
    if os.environ["RANK"] == "0":
        os._exit(7)
    time.sleep(600)


def _hang_in_a_named_function():
    time.sleep(600)


def _hang_on_rank_0():
    if os.environ["RANK"] == "0":
        _hang_in_a_named_function()


def _unpicklable():
    return lambda: None


def _variable(name):
    return os.environ.get(name)


def test_results_come_in_rank_order_from_fresh_processes():
    first = run_ranks(_identity, "x", world_size=3)
    second = run_ranks(_identity, "x", world_size=3)
    assert [result[:3] for result in first] == [("x", 0, 3), ("x", 1, 3), ("x", 2, 3)]
    pids = {result[3] for result in first + second}
    assert len(pids) == 6
    assert os.getpid() not in pids


def test_deepspeed_makes_a_process_group():
    assert run_ranks(_sum_of_ranks, world_size=4) == [(10, 1)] * 4


def test_a_failing_rank_is_reported_with_its_traceback_and_ends_the_others():
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(_fail_on_rank_1)
    message = str(failure.value)
    assert message.startswith("rank 1 of 2 failed\n")
    assert "in _fail_on_rank_1" in message
    assert "ValueError: the cause is here" in message
    assert "said before failing" in message
    assert time.monotonic() - start < 30  # rank 0 sleeps 600 s


def test_an_assertion_that_fails_in_a_rank_names_the_values_in_full():
    with pytest.raises(RankFailure) as failure:
        run_ranks(_assert_on_rank_1, [*range(99), "other"])
    message = str(failure.value)
    assert "AssertionError: what was read" in message
    assert f"{[*range(99), 'other']} == {list(range(100))}" in message


def test_a_dead_rank_is_reported_with_its_exit_code():
    with pytest.raises(RankFailure, match="rank 0 of 2 died with exit code 7"):
        run_ranks(_die_on_rank_0)


def test_a_hang_is_caught_with_the_stack_of_the_hanging_rank():
    run_ranks(_identity, "warm")  # so that only the hang is timed
    start = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        run_ranks(_hang_on_rank_0, timeout_s=2)
    message = str(failure.value)
    assert message.startswith("no result from 1 of 2 ranks within 2 s")
    assert "rank 0 of 2 was still running" in message
    assert "in _hang_in_a_named_function" in message
    assert time.monotonic() - start < 30


def test_a_result_that_cannot_be_pickled_is_a_failure():
    with pytest.raises(RankFailure, match=r"rank [01] of 2 failed"):
        run_ranks(_unpicklable)


def test_env_reaches_the_ranks_and_only_them():
    assert run_ranks(_variable, "LOWMEM_TEST_VARIABLE", env={"LOWMEM_TEST_VARIABLE": "7"}) == ["7", "7"]
    assert "LOWMEM_TEST_VARIABLE" not in os.environ
