"""Digests of lines of text."""

from __future__ import annotations

import itertools

from lowmem_load.fingerprint import fingerprint


def test_equal_lines_have_equal_digests_in_every_process() -> None:
    expected = "911169ddaaf146af"  # printf 'a\nb\n' | sha256sum
    assert fingerprint(["a", "b"]) == fingerprint(line for line in ("a", "b")) == expected


def test_other_lines_have_other_digests() -> None:
    texts = [[], [""], ["", ""], ["ab"], ["a", "b"], ["b", "a"], ["a", "b", ""], ["A", "b"], ["\ud800"], ["\ud801"]]
    for left, right in itertools.combinations(texts, 2):
        assert fingerprint(left) != fingerprint(right), (left, right)


def test_a_name_that_is_no_unicode_has_one() -> None:
    """File names may be any bytes; Python spells those that are not UTF-8 with surrogates."""
    assert len(fingerprint([b"\xff.safetensors".decode("utf-8", "surrogateescape")])) == 16
