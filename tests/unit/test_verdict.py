"""What comes of a step, by what each rank brings to it."""

from __future__ import annotations

from typing import Any

import pytest

from lowmem_load.distributed.verdict import Entry, Verdict, verdict_on


def entry(**brought: Any) -> Entry:
    return Entry("planning", **brought)


STOPPED = entry(error="stopped because of rank(s) 2", is_stopped=True)


def verdict(*entries: Entry) -> Verdict:
    return verdict_on(dict(enumerate(entries)))


def failures(*entries: Entry) -> dict[int, str]:
    return dict(verdict(*entries).failures)


def test_each_rank_that_failed_is_named() -> None:
    found = verdict(entry(), entry(error="no"), entry(error="not"), entry())
    assert dict(found.failures) == {1: "no", 2: "not"}
    assert not found.is_alike


def test_ranks_that_stopped_because_of_another_are_not_named_unless_there_is_no_other() -> None:
    assert failures(STOPPED, entry(), entry(error="no")) == {2: "no"}
    assert failures(STOPPED, entry(), entry()) == {0: STOPPED.error}


@pytest.mark.parametrize(
    ("texts", "is_alike"),
    [
        (["no", "no"], True),
        (["no", "not"], False),
        (["f at 0x7f on cuda:0", "f at 0x80 on cuda:1"], True),  # addresses and devices are each rank's own
        (["step 1", "step 2"], False),
    ],
)
def test_whether_all_failed_alike(texts: list[str], is_alike: bool) -> None:
    assert verdict(*(entry(error=text) for text in texts)).is_alike is is_alike
    assert not verdict(*(entry(error=text) for text in texts), entry()).is_alike


def test_an_error_comes_before_a_difference_of_titles_and_that_before_one_of_digests() -> None:
    saving, other = Entry("saving", digest={"files": "a"}), entry(digest={"files": "b"})
    assert failures(other, saving, entry(error="no")) == {2: "no"}
    assert failures(other, saving, other) == {1: "is at 'saving', where rank(s) 0, 2 are at 'planning'"}
    assert failures(other, entry(digest={"files": "a"}), other) == {1: "holds files a, where rank(s) 0, 2 hold b"}


def test_what_differs_is_measured_against_what_most_hold() -> None:
    def of(*digests: str) -> dict[int, str]:
        return failures(*(entry(digest={"files": digest} if digest else {}) for digest in digests))

    assert of("a", "a", "a") == {}
    assert of("a", "b") == {1: "holds files b, where rank(s) 0 hold a"}
    assert of("x", "a", "a", "") == {
        0: "holds files x, where rank(s) 1-2 hold a",
        3: "holds files none, where rank(s) 1-2 hold a",
    }


def test_each_topic_that_differs_is_named() -> None:
    usual = {"commit": "c1", "files": "f1", "configuration": "k1"}
    found = failures(*(entry(digest=digest) for digest in (usual, usual, {**usual, "commit": "c2", "files": "f2"})))
    assert found == {2: "holds commit c2, where rank(s) 0-1 hold c1; holds files f2, where rank(s) 0-1 hold f1"}
