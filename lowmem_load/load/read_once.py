"""Reads once what several ranks need: each rank reads its share, and sends it. See [Note: read once] in `replicas.py`.

[Note: reading and sending] The threads of the executor read one batch after the other, and stop for nothing but the
main thread being two batches behind. The main thread waits for its own part of a batch, agrees with all ranks of the
load that they have theirs, and sends and receives it. So nobody waits in a broadcast for a rank that still reads, or
has failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from lowmem_load.distributed.side_group import SideGroup
from lowmem_load.distributed.steps import RankGroup
from lowmem_load.files.executor import Executor
from lowmem_load.files.memory import make_pages, own_memory
from lowmem_load.files.remote_file import results_of
from lowmem_load.phases import Progress
from lowmem_load.planning.load_plan import LoadPlan
from lowmem_load.planning.planner import Constants
from lowmem_load.planning.replicas import BATCH_BYTES, LEAST_BYTES, Replicas, ShareReads, chooser, plan_replicas

BATCHES_AHEAD = 2
"""Batches that are read before the one that is sent."""

Summary = tuple[list[tuple[str, int]], int]
"""What other ranks must know of what one shares: digests, each with the number of ranks that share it; and batches."""


class ReadOnce:
    """Fills memory together with other ranks that need the same. Close it after the load."""

    def __init__(self, ranks: RankGroup, nodes: Sequence[str], share: ShareReads) -> None:
        self.received_bytes = 0  # that have come from other ranks
        self.progress: Callable[[], Progress] | None = None  # of this rank, with all that it reads
        self.why_alone = ""  # why each rank reads alone although it shares
        self.ranks, self._nodes, self._share, self._replicas = ranks, nodes, share, list[Replicas]()
        self._num_batches = 0
        self._wanted: set[tuple[int, int]] = set()
        self._groups: list[SideGroup] = []
        self._memory: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def num_on_node(self) -> int:
        """Number of ranks on the node of this one."""
        return self._nodes.count(self._nodes[self.ranks.rank])

    @property
    def num_waits(self) -> int:
        """Waits for messages, which are progress."""
        return sum(group.num_waits for group in self._groups)

    def plan(self, plan: LoadPlan, device: torch.device) -> tuple[Summary, int]:
        """Plan what this rank shares with which ranks, in memory of a device.

        Returns what all others must know of it, and the host memory that messages will take.
        """
        least_bytes = 0 if self._share == "job" else LEAST_BYTES
        on_host = device.type == "cpu"
        reads_once = chooser(self._share, plan.read_cost, self._nodes, on_host=on_host)
        self._replicas = plan_replicas(plan, reads_once, least_bytes)
        num_batches = max((replicas.num_batches for replicas in self._replicas), default=0)
        message_bytes = 0
        for number in range(0 if on_host else num_batches):
            of_ranks = [replicas.batch(number, place) for replicas in self._replicas for place in replicas.places]
            sizes = [sum(piece.nbytes for piece in batch) for batch in of_ranks]
            message_bytes = max(message_bytes, min(sum(sizes), BATCH_BYTES + max(sizes)))
        known = [(replicas.digest, len(replicas.ranks)) for replicas in self._replicas]
        return (known, num_batches), message_bytes

    def agree(self, summaries: Sequence[Summary]) -> None:
        """Share what was planned, unless ranks have planned it otherwise."""
        counts = Counter((digest, size) for known, _ in summaries for digest, size in known)
        if any(count != size for (_, size), count in counts.items()):
            self.why_alone = "ranks that need the same have not planned the same reads"
        else:
            self._num_batches = max(number for _, number in summaries)
        if self._num_batches:
            pieces = (piece for replicas in self._replicas for piece in replicas.pieces)
            self._wanted = {(piece.target, piece.destination) for piece in pieces}

    def takes(self, target: int, destination: int, memory: torch.Tensor) -> bool:
        """Return whether `run` will fill this memory of a destination of the plan."""
        is_wanted = (target, destination) in self._wanted
        if is_wanted:
            self._memory[target, destination] = memory
        return is_wanted

    def run(self, name: str, executor: Executor, constants: Constants) -> None:
        """Fill all memory that was taken. Collective: of all ranks of the load."""
        if not self._num_batches:
            return
        with self.ranks.step("connecting ranks that need the same", name=name, progress=self.progress):
            for replicas in self._replicas:
                self._groups.append(SideGroup(self.ranks, replicas.ranks))
                self._groups[-1].connect()
        batches: list[list[Future[None]]] = []
        for number in range(self._num_batches):
            with self.ranks.step("reading for other ranks", name=name, progress=self.progress):
                while len(batches) <= min(number + BATCHES_AHEAD, self._num_batches - 1):
                    own = [
                        (piece.fill, self._memory[piece.target, piece.destination])
                        for replicas, group in zip(self._replicas, self._groups, strict=True)
                        for piece in replicas.batch(len(batches), group.place)
                    ]
                    batches.append(executor.fill_parts(own, constants))
                results_of(batches[number], self.ranks.check)
                executor.order_after_copies()
            self._exchange(number, executor)

    def close(self) -> None:
        """Leave the groups, and give up the memory."""
        for group in self._groups:
            group.close()
        self._groups, self._memory = [], {}

    def _exchange(self, number: int, executor: Executor) -> None:
        """Send and receive a batch. Collective, after all ranks have read their parts."""
        staged: list[tuple[torch.Tensor, torch.Tensor]] = []  # host memory that is sent, and that of a device
        for replicas, group in zip(self._replicas, self._groups, strict=True):
            for place in replicas.places:
                for piece in replicas.batch(number, place):
                    memory = self._memory[piece.target, piece.destination][piece.first : piece.first + piece.numel]
                    sent, is_own = memory.view(torch.uint8), place == group.place
                    if not memory.is_cpu:
                        sent = sent.cpu() if is_own else own_memory(piece.nbytes, torch.device("cpu"))
                        staged.append((sent, memory.view(torch.uint8)))
                    elif not is_own:
                        make_pages(sent.numpy().data)
                    group.broadcast(sent, place)
                    if not is_own:
                        self.received_bytes += piece.nbytes
                        executor.on_bytes(piece.read_bytes)
                if sum(sent.numel() for sent, _ in staged) >= BATCH_BYTES:
                    self._finish(staged)
        self._finish(staged)

    def _finish(self, staged: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for group in self._groups:
            group.finish(self.ranks.check)
        for sent, memory in staged:
            memory.copy_(sent)
        staged.clear()
