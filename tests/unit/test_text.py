"""Sizes as text; digests of lines of text."""

import pytest

from lowmem_load.text import count, fingerprint, size, spell_ranks


def test_sizes_are_written() -> None:
    assert [size(nbytes) for nbytes in (0, 1023, 1024, 10 << 10, 3 << 29, 5 << 50)] == [
        *("0 B", "1023 B", "1.00 KiB", "10.0 KiB", "1.50 GiB", "5120.0 TiB"),
    ]
    assert [count(number) for number in (0, 1234, 8.03e9, 1.5e6, 2e12)] == ["0", "1,234", "8.03 B", "1.50 M", "2.00 T"]


def test_equal_lines_have_equal_digests_in_every_process() -> None:
    expected = "911169ddaaf146af"  # printf 'a\nb\n' | sha256sum
    assert fingerprint(["a", "b"]) == fingerprint(line for line in ("a", "b")) == expected
    assert len({fingerprint(lines) for lines in ([], [""], ["ab"], ["a", "b", ""], ["\ud800"])} | {expected}) == 6


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5], "0-2, 5"), ([0, 2, 3], "0, 2-3"), (range(512), "0-511")]
)
def test_spell_ranks(ranks: list[int], text: str) -> None:
    assert spell_ranks(list(ranks)) == text
