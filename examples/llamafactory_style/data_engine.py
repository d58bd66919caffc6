"""The dataset: rows of prompt and completion, tokenized once, dealt out to ranks step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

IGNORED_LABEL = -100


class DataEngine:
    """Gives every rank its micro-batches of a step; which rows those are depends on step, seed and rank only.

    Args:
        path: a JSON Lines file with "prompt" and "completion".
        tokenizer: of the model.
        cutoff_len: tokens kept of a row.
    """

    def __init__(self, path: str, tokenizer: Any, cutoff_len: int) -> None:
        rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
        self._rows = [self._tokenize(row, tokenizer, cutoff_len) for row in rows]
        self._pad = tokenizer.pad_token_id

    def micro_batches(
        self, step: int, *, seed: int, rank: int, world_size: int, micro_batch_size: int, num_micro_batches: int
    ) -> list[dict[str, torch.Tensor]]:
        """Return this rank's micro-batches of one step: int64 tensors (micro_batch_size, longest row)."""
        per_step = micro_batch_size * num_micro_batches * world_size
        first = step * per_step + rank * micro_batch_size * num_micro_batches
        rows = [self._row(first + offset, seed) for offset in range(micro_batch_size * num_micro_batches)]
        return [
            self._collate(rows[start : start + micro_batch_size]) for start in range(0, len(rows), micro_batch_size)
        ]

    def _row(self, position: int, seed: int) -> tuple[list[int], list[int]]:
        epoch, index = divmod(position, len(self._rows))
        order = torch.randperm(len(self._rows), generator=torch.Generator().manual_seed(seed + epoch))
        return self._rows[int(order[index])]

    def _tokenize(self, row: dict[str, str], tokenizer: Any, cutoff_len: int) -> tuple[list[int], list[int]]:
        prompt = tokenizer(row["prompt"])["input_ids"]
        completion = [*tokenizer(row["completion"])["input_ids"], tokenizer.eos_token_id]
        labels = [IGNORED_LABEL] * len(prompt) + completion
        return (prompt + completion)[:cutoff_len], labels[:cutoff_len]

    def _collate(self, rows: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(ids) for ids, _ in rows)
        padding = [longest - len(ids) for ids, _ in rows]
        ids = [ids + [self._pad] * pad for (ids, _), pad in zip(rows, padding, strict=True)]
        labels = [labels + [IGNORED_LABEL] * pad for (_, labels), pad in zip(rows, padding, strict=True)]
        mask = [[1] * (longest - pad) + [0] * pad for pad in padding]
        return {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor(labels),
            "attention_mask": torch.tensor(mask),
        }
