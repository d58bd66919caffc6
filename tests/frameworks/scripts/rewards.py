"""A reward for TRL's GRPO that differs between completions of any model, however little it was trained."""

from typing import Any


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Return the share of even token ids in each completion."""
    return [sum(token % 2 == 0 for token in completion) / max(1, len(completion)) for completion in completion_ids]
