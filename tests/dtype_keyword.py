"""Lets tests say `dtype=` to transformers before 4.56, where the keyword of `from_pretrained` is torch_dtype."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

HAS_DTYPE = hasattr(PretrainedConfig, "torch_dtype")
"""A property of 4.56 and later, for those who still ask for it."""


def accept_dtype() -> None:
    """What lowmem_load itself passes on is tested in tests/unit/test_loader.py."""
    if HAS_DTYPE:
        return
    ordinary = vars(PreTrainedModel)["from_pretrained"].__func__

    @functools.wraps(ordinary)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        if "dtype" in kwargs:
            kwargs["torch_dtype"] = kwargs.pop("dtype")
        return ordinary(cls, *args, **kwargs)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
