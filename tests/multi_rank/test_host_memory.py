"""A load that does not fit into host memory is one error on all ranks, with sizes, before anything is allocated."""

import json
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from lowmem_load import LowMemLoadError, RankError, load_model
from lowmem_load.load import checks
from tests import builders
from tests.parity import BF16
from tests.ranks import run_ranks

ROWS, COLUMNS = 1 << 17, 1 << 10
"""Of two parameters of 512 MiB: their files have holes, and no bytes on the disk."""

HEADROOM_BYTES = 128 << 20
"""Address space for what a load needs in addition to partitions."""


def large_llama(folder: Path, small: Path) -> Path:
    """Return a checkpoint like a small one, with two large parameters of zeros."""
    config = json.loads((small / "config.json").read_text())
    config.update(vocab_size=ROWS, hidden_size=COLUMNS, tie_word_embeddings=False, num_hidden_layers=0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in {
        "model.embed_tokens.weight": [ROWS, COLUMNS],
        "lm_head.weight": [ROWS, COLUMNS],
        "model.norm.weight": [COLUMNS],
    }.items():
        start, end = end, end + 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def mapped_bytes() -> int:
    return int(re.findall(r"VmSize:\s*(\d+)", Path("/proc/self/status").read_text())[0]) << 10


def load_with_a_limit(small: str, large: str) -> None:
    """Rank function: rank 1 has a limit."""
    is_limited = os.environ["RANK"] == "1"
    fp32 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    load_model(small, BF16)  # threads and heaps are there
    before = resource.getrlimit(resource.RLIMIT_AS)
    if is_limited:
        resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + HEADROOM_BYTES, before[1]))
    start_bytes, start_s = mapped_bytes(), time.monotonic()
    with pytest.raises(
        LowMemLoadError, match=r"does not fit into host memory: rank\(s\) 1 need 5\d\d\.\d MiB, "
    ) as caught:
        load_model(large, fp32)
    assert isinstance(caught.value, MemoryError)
    assert re.search(
        r"1\d\d\.\d MiB are free \(limit of .* of the address space of a process \(ulimit\)\)", str(caught.value)
    )
    assert mapped_bytes() - start_bytes < 64 << 20, "nothing was allocated"
    assert time.monotonic() - start_s < 30

    with pytest.MonkeyPatch.context() as patch:  # what the comparison does not see
        patch.setattr(checks, "rooms", lambda _: [])
        with pytest.raises(RankError) as failed:
            load_model(large, fp32)
    assert list(failed.value.failures) == [1]
    assert re.match(
        r"MemoryShortageError: parameter (lm_head|model\.embed_tokens)\.weight, after 0\.0 of 512\.0 MiB: 256\.0 MiB "
        r"of memory cannot be allocated: .*can't allocate memory",
        failed.value.failures[1],
    ), failed.value
    resource.setrlimit(resource.RLIMIT_AS, before)
    load_model(small, BF16)


def test_one_rank_with_a_limit_is_an_error_on_all(checkpoints: Path, tmp_path: Path) -> None:
    small = builders.tiny_llama(checkpoints)
    run_ranks(load_with_a_limit, str(small), str(large_llama(tmp_path / "large", small)), timeout_s=180)
