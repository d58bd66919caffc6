"""A load that does not fit into host memory is one error on all ranks, with sizes, before anything is allocated."""

import contextlib
import gc
import json
import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.memory import in_cgroup
from lowmem_load import LowMemLoadError, RankError, get_load_report, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.files.source import LocalFile
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


def load_in_a_cgroup(path: str, name: str) -> str:
    """Rank function: the ranks together may take 1.2 times the partitions. Returns why no cgroup can be made."""
    ranks, file = DistributedInterface(), os.path.join(path, "model.safetensors")
    load_model(path, BF16)  # imports the rest
    gc.collect()
    with contextlib.ExitStack() as stack:
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        ranks.barrier()
        try:
            cached_bytes = stack.enter_context(in_cgroup(name, int(1.2 * os.path.getsize(file))))
        except (OSError, StopIteration) as error:
            return f"no cgroup of memory can be made: {error!r}"
        ranks.barrier()
        model = load_model(path, BF16)
        assert cached_bytes() < 16 << 20
        ranks.barrier()
    assert get_load_report(model).direct_files == 1
    for key, parameter in model.named_parameters():
        partition: torch.Tensor = parameter.ds_tensor
        start = ranks.rank * partition.numel()
        assert torch.equal(partition, load_file(file)[key].flatten()[start : start + partition.numel()]), key
    return ""


def test_a_cgroup_with_room_for_partitions_alone_is_enough(tmp_path: Path) -> None:
    """What is read goes past the page cache there."""
    config = LlamaConfig(vocab_size=96 << 10, hidden_size=1 << 10, num_hidden_layers=0, tie_word_embeddings=False)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    with contextlib.closing(LocalFile(str(tmp_path / "model.safetensors"))) as file:
        if not file.bypass_cache():
            pytest.skip(f"{tmp_path} cannot be read past the page cache")
    reasons = run_ranks(load_in_a_cgroup, str(tmp_path), f"lowmem_load_test_{os.getpid()}", timeout_s=120)
    if any(reasons):
        pytest.skip(reasons[0])
