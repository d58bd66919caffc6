"""Loads and saves of two nodes with two ranks each: `make test-nodes`.

What one machine cannot show with ordinary ranks: a cable that is cut, process numbers that mean nothing elsewhere, and
files that differ under one path. Skipped where namespaces cannot be made.
"""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lowmem_load import get_load_report, load_model, save_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import LowMemLoadError
from lowmem_load.files.source import LocalFile
from lowmem_load.load import load, read_once
from tests import builders
from tests.nodes.network import ADDRESSES, INTERFACE, Cable, Unavailable, in_node
from tests.parity import BF16
from tests.ranks import run_ranks
from tests.storage import on_network

pytestmark = pytest.mark.release

RANKS_PER_NODE = 2
LIMIT_S = 30.0
"""Seconds from a cut until all ranks have raised: the first node misses heartbeats, the second one the store."""


@pytest.fixture
def cable() -> Iterator[Cable]:
    try:
        with Cable() as cable:
            yield cable
    except Unavailable as reason:
        pytest.skip(str(reason))


def on_node(pids: list[int], work: Callable[..., Any], *arguments: Any) -> Any:
    """Rank function: runs `work(node, ...)` on this rank's node."""
    rank = int(os.environ["RANK"])
    node = rank // RANKS_PER_NODE
    os.environ |= {"LOCAL_RANK": str(rank % RANKS_PER_NODE), "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE)}
    os.environ |= {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": INTERFACE}
    return in_node(pids[node], work, node, *arguments)


def run(cable: Cable, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    env = {"MASTER_PORT": "29400", "LOWMEM_LOAD_GONE_S": "25"}
    return run_ranks(on_node, cable.pids, work, *arguments, world_size=4, timeout_s=120, env=env)


def mount(source: str, place: str) -> None:
    """Makes a folder appear at another path, on this rank's node. The first of its ranks does it, before the group."""
    if os.environ["LOCAL_RANK"] == "0":
        subprocess.run(["mount", "--bind", source, place], check=True)


def load_error(node: int, path: str, other: str | None = None) -> str:
    """Loads; the second node finds `other` at this path. Returns the error."""
    if other is not None and node == 1:
        mount(other, path)
    DistributedInterface().barrier()
    try:
        load_model(path, BF16)
    except LowMemLoadError as error:
        return str(error)
    return ""


def other_revision(path: Path, copy: Path) -> None:
    """Writes a copy of a checkpoint with other values of the same names and shapes."""
    shutil.copytree(path, copy)
    tensors = {name: tensor + 1 for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})


def test_nodes_whose_files_differ_under_one_path_do_not_load(cable: Cable, checkpoints: Path, tmp_path: Path) -> None:
    path = builders.tiny_llama(checkpoints)
    other_revision(path, tmp_path / "other")
    texts = run(cable, load_error, str(path), str(tmp_path / "other"))
    assert len(set(texts)) == 1
    assert "model.safetensors" in texts[0]


def save_under_two_paths(node: int, path: str, folders: list[str]) -> list[str]:
    """Saves to one folder that the second node finds at a path of its own; returns what is there."""
    if node == 1:
        mount(folders[0], folders[1])
    model = load_model(path, BF16)
    save_model(model, Path(folders[node]) / "saved")
    load_model(str(Path(folders[node]) / "saved"), BF16)
    return sorted(os.listdir(Path(folders[node]) / "saved"))


def test_a_folder_may_have_two_paths(cable: Cable, checkpoints: Path, tmp_path: Path) -> None:
    path, folders = builders.tiny_llama(checkpoints), [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    found = run(cable, save_under_two_paths, str(path), [*map(str, folders)])
    assert found == [["config.json", "generation_config.json", "model.safetensors"]] * 4
    assert load_file(folders[0] / "saved" / "model.safetensors").keys() == load_file(path / "model.safetensors").keys()


def load_whole(_: int, path: str) -> tuple[int, int, float]:
    """Loads from a network file system under ZeRO-2; returns bytes read and received, and a sum of all values."""
    read_once.LEAST_BYTES = 0
    with on_network():
        model = load_model(path, {**BF16, "zero_optimization": {"stage": 2}})
    report = get_load_report(model)
    return report.read_bytes, report.received_bytes, sum(float(p.detach().double().sum()) for p in model.parameters())


def test_nodes_read_once_what_all_ranks_hold(cable: Cable, checkpoints: Path) -> None:
    path = builders.tiny_llama(checkpoints)
    found = run(cable, load_whole, str(path))
    nbytes = sum(tensor.nbytes for tensor in load_file(path / "model.safetensors").values())
    assert sum(read for read, _, _ in found) == nbytes
    assert all(read + received == nbytes for read, received, _ in found)
    assert len({total for *_, total in found}) == 1


def read_slowly(node: int, path: str, marker: str) -> tuple[float, str]:
    """Loads, a second for each read; returns when and how that failed."""
    ordinary_read, ordinary_execute = LocalFile.read_into, load.execute

    def read_into(file: Any, offset: int, memory: memoryview) -> None:
        time.sleep(1)
        ordinary_read(file, offset, memory)

    def execute(*arguments: Any) -> Any:
        Path(marker, os.environ["RANK"]).touch()
        LocalFile.read_into = read_into  # type: ignore[method-assign]
        return ordinary_execute(*arguments)

    load.execute = execute
    text = load_error(node, path)
    return time.monotonic(), text


def test_ranks_that_read_notice_a_cut(cable: Cable, checkpoints: Path, tmp_path: Path) -> None:
    path, cut_at = builders.tiny_llama(checkpoints, num_hidden_layers=24), list[float]()

    def cut() -> None:
        deadline = time.monotonic() + 60
        while len(os.listdir(tmp_path)) < 2 * RANKS_PER_NODE and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2)
        cut_at.append(time.monotonic())
        cable.cut()

    cutter = threading.Thread(target=cut)
    cutter.start()
    answers = run(cable, read_slowly, str(path), str(tmp_path))
    cutter.join()
    seconds = [at - cut_at[0] for at, _ in answers]
    print([round(each, 1) for each in seconds], {text.partition("\n")[2] for _, text in answers})
    for rank, (_, text) in enumerate(answers):
        node = rank // RANKS_PER_NODE
        assert seconds[rank] < LIMIT_S
        assert ("the rendezvous store" if node else "rank 2: has sent no heartbeat") in text
