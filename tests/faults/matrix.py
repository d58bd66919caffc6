"""Runs rows of the matrix and judges them: outcome, time, texts, what is left behind, and whether a retry is exact."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import builders
from tests.faults.faults import ANY_SHARD, SHARD, Case, Scene
from tests.faults.shim import Action, Call, Rule
from tests.faults.team import Team, Zygote
from tests.faults.worker import MARK, Answer, Command

SLACK_S = 10.0
"""Beyond the limit of a row: what is late is waited for so long, then it hangs."""
RETRY_S = 60.0
MARKS = ("agree_on_bytes", "execute", "make_plan", "prepare", "move_to", "_exchange", "_finish", "_fill", "broadcast")
SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 6, "max_shard_size": "150KB"}
"""Of the checkpoint: several shards, of which each rank reads its parts."""

DS_CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


@dataclass
class Verdict:
    """What came of a row: seconds from the fault until the last rank had raised, and why the row is not clean."""

    case: Case
    outcome: str = ""
    seconds: float | None = None
    problems: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    text: str = ""


class _NoReference(RuntimeError):
    """There is nothing to compare a row with."""


@dataclass(frozen=True)
class _Reference:
    """A clean load: what each rank held afterwards, and how many calls it made of each kind while it read."""

    digests: Mapping[int, str]
    counts: Mapping[Call, list[int]]


class Matrix:
    """Runs rows; keeps a set of ranks for as long as it is good. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._pristine = builders.tiny_llama(folder, **SIZES)
        self._other = _different(self._pristine, folder / "other")
        self._zygote = Zygote()
        self._team: Team | None = None
        self._key: tuple[int, float] | None = None
        self._references: dict[tuple[int, Path, str], _Reference] = {}
        self._num_runs = 0

    def __enter__(self) -> Matrix:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop_team()
        self._zygote.close()

    def run(self, case: Case) -> Verdict:
        """Runs one row."""
        verdict, team = Verdict(case), self._team_for(case)
        try:
            reference = self._reference(team, case, self._pristine)
            exact = [reference.digests]
            if case.fault.expect == "either":
                exact.append(self._reference(team, case, self._other).digests)
        except _NoReference as error:
            verdict.problems.append(str(error))
            self._drop_team()
            return verdict
        answers = self._strike(team, case, reference, verdict)
        judge(verdict, exact, answers)
        if case.keeps_ranks and len(answers) == case.world_size and None not in answers.values():
            self._retry(team, case, reference, verdict)
        if verdict.problems or not case.keeps_ranks:
            self._drop_team()
        return verdict

    # -- the parts of a run ------------------------------------------------------------------------------------------

    def _strike(self, team: Team, case: Case, reference: _Reference, verdict: Verdict) -> dict[int, Answer | None]:
        """Plays the fault; returns what ranks answered, those that hang left out."""
        fault, control, everyone = case.fault, team.controls[case.rank], set(range(team.world_size))
        folders = self._folders_for(team, case, self._pristine, copied=case.moment.own_copy or fault.expect == "either")
        scene = self._scene(team, case, folders)
        control.set([self._rule(case, reference)])
        self._send(team, case, folders, case.arguments)
        if fault.act is not None and not self._has_come(team, case, verdict):
            return {}
        struck = time.perf_counter()
        if fault.act is not None:
            fault.act(scene)
        if fault.expect != "silent":
            control.release()
        first = everyone - {case.rank} if fault.expect == "silent" else everyone
        late = max(fault.limit_s, RETRY_S if fault.expect == "loads" else 0) + SLACK_S
        answers = team.answers(first, struck + late)
        if fault.undo is not None:
            fault.undo(scene)
            control.release()
            answers |= team.answers(everyone - first, time.perf_counter() + late)
        if fault.act is None:
            struck = control.fired_at() or struck
        if not control.num_fired():
            verdict.problems.append("the moment never came")
        for other in team.controls:
            other.clear()
        if missing := everyone - set(answers):
            verdict.problems.append(f"rank(s) {sorted(missing)} hang")
            verdict.text = team.stacks(missing)
        if raised := [answer.at for answer in answers.values() if answer is not None and answer.kind]:
            verdict.seconds = max(raised) - struck
        return answers

    def _has_come(self, team: Team, case: Case, verdict: Verdict) -> bool:
        """Waits until the faulty rank is held."""
        control, deadline = team.controls[case.rank], time.perf_counter() + RETRY_S
        while not control.num_fired():
            early = team.answers(set(range(team.world_size)), time.perf_counter() + 0.002)
            if early or time.perf_counter() > deadline:
                verdict.problems.append(f"the moment never came: {early}")
                return False
        return True

    def _retry(self, team: Team, case: Case, reference: _Reference, verdict: Verdict) -> None:
        answers = self._clean(team, case, self._pristine)
        found = {rank: answer.digest for rank, answer in answers.items() if answer is not None}
        if found != dict(reference.digests):
            texts = {answer.text[:300] if answer else "died" for answer in answers.values()}
            verdict.problems.append(f"retry: {len(answers)} answers, digests {found}: {texts}")

    def _rule(self, case: Case, reference: _Reference) -> Rule:
        fault, moment = case.fault, case.moment
        calls = moment.calls if fault.calls is None else fault.calls
        skip = 0
        if moment.at != "first" and calls == moment.calls:
            num_calls = reference.counts[moment.calls][case.rank]
            skip = num_calls // 2 if moment.at == "middle" else num_calls - 1
        times = 1 if fault.action is Action.HOLD else fault.times
        return Rule(
            calls,
            moment.path,
            fault.action,
            fault.argument,
            skip,
            times,
            moment.mark and MARK + moment.mark,
            fault.size,
        )

    def _scene(self, team: Team, case: Case, folders: dict[int, Path]) -> Scene:
        shards = list((folders[case.rank] / "checkpoint").glob(f"*{SHARD}*"))
        others = list(self._other.glob(f"*{SHARD}*"))
        none = Path("/nonexistent")
        return Scene(team.pids[case.rank], shards[0] if shards else none, others[0] if others else none)

    def _send(self, team: Team, case: Case, folders: dict[int, Path], arguments: Mapping[str, Any]) -> None:
        for folder in folders.values():
            (folder / "ds.json").write_text(json.dumps(DS_CONFIG))
            (folder / "load.json").write_text(json.dumps(DS_CONFIG))
        for rank, folder in folders.items():
            team.send(rank, Command(case.job, str(folder), arguments, MARKS))

    def _folders_for(self, team: Team, case: Case, pristine: Path, *, copied: bool) -> dict[int, Path]:
        """Returns where each rank runs. Copied: those who share the faulty rank's files have ones of their own."""
        self._num_runs += 1
        folder = team.folder / f"run{self._num_runs}"
        own = shutil.copytree(pristine, folder / "own") if copied else pristine
        found = {}
        for rank in range(team.world_size):
            found[rank] = folder / f"rank{rank}"
            found[rank].mkdir(parents=True)
            is_own = rank == case.rank or not case.moment.own_copy
            (found[rank] / "checkpoint").symlink_to(own if is_own else pristine)
        return found

    def _reference(self, team: Team, case: Case, checkpoint: Path) -> _Reference:
        """Returns the clean load that rows are compared with. A set of ranks does one before its first such row."""
        key = (case.world_size, checkpoint, case.job)
        if key in team.warm:
            return self._references[key]
        wanted = (Call.READ, Call.FSTAT)
        for control in team.controls:
            control.set(Rule(calls, ANY_SHARD, mark=f"{MARK}execute") for calls in wanted)
        answers = self._clean(team, case, checkpoint)
        if len(answers) < team.world_size or any(answer is None or answer.kind for answer in answers.values()):
            raise _NoReference(f"a load without a fault fails: {answers}")
        counts = {which: [control.num_matched(n) for control in team.controls] for n, which in enumerate(wanted)}
        found = _Reference({rank: answer.digest for rank, answer in answers.items() if answer is not None}, counts)
        known = self._references.setdefault(key, found)
        if known.digests != found.digests:
            raise _NoReference(f"clean loads of two sets of ranks differ: {known} and {found}")
        team.warm.add(key)
        return known

    def _clean(self, team: Team, case: Case, checkpoint: Path) -> dict[int, Answer | None]:
        arguments = {name: value for name, value in case.arguments.items() if name != "fails_on"}
        self._send(team, case, self._folders_for(team, case, checkpoint, copied=False), arguments)
        return team.answers(set(range(team.world_size)), time.perf_counter() + RETRY_S)

    # -- sets of ranks -----------------------------------------------------------------------------------------------

    def _team_for(self, case: Case) -> Team:
        key = (case.world_size, case.fault.group_timeout_s)
        if self._team is None or self._key != key:
            self._drop_team()
            self._team, self._key = Team(self._zygote, *key), key
        return self._team

    def _drop_team(self) -> None:
        if self._team is not None:
            self._team.close()
        self._team = None


def judge(verdict: Verdict, exact: list[Mapping[int, str]], answers: Mapping[int, Answer | None]) -> None:
    """Says in `verdict` what came of its row, and all that is not as it must be. A rank that died answers None.

    `exact` has the digests, by rank, of what may be loaded.
    """
    case = verdict.case
    expect, faulty, problems = case.fault.expect, case.rank, verdict.problems
    alive = {rank: answer for rank, answer in answers.items() if answer is not None}
    raised = {rank: answer for rank, answer in alive.items() if answer.kind}
    dead = set(answers) - set(alive)
    # A stopped rank 0 takes the store along. It hears afterwards that the others went on, unless their last word was
    # under way; and their threads wait for the store for as long as it is stopped.
    is_without_store = expect == "silent" and faulty == 0 and case.fault.name == "SIGSTOP"
    verdict.outcome = "hang" if len(answers) < case.world_size else _outcome(answers)
    verdict.left = [
        f"rank {rank}: {item}"
        for rank, answer in alive.items()
        for item in answer.left
        # DeepSpeed 0.19.8 never frees an engine, with or without lowmem_load, destroyed or not
        if not (case.job in ("train", "resume") and "of tensors" in item)
        and not (is_without_store and "thread" in item)
    ]
    verdict.text = verdict.text or next((answer.text for answer in raised.values()), "")
    if dead != ({faulty} if expect == "dies" else set()):
        problems.append(f"rank(s) {sorted(dead)} died")
    if expect == "loads" or (expect == "either" and not raised):
        found = {rank: answer.digest for rank, answer in alive.items()}
        if found not in exact:
            problems.append("other weights: " + " ".join(map(_spelled, alive.values())))
        return
    if returned := sorted(set(alive) - set(raised) - ({faulty} if is_without_store else set())):
        problems.append(f"rank(s) {returned} returned a model")
    own = {faulty} if expect in ("interrupted", "own error") or is_without_store else set()
    ours = [answer for rank, answer in raised.items() if rank not in own]
    problems.extend(f"not ours: {_spelled(answer)}" for answer in ours if not answer.is_ours)
    texts = sorted({answer.text for answer in ours})
    # The store ends, or stands still, with rank 0: then each rank says how it noticed that.
    has_no_store = faulty == 0 and expect in ("dies", "silent")
    # Whether it died before or after its last answer was read decides which step the others name, in the first line.
    if not has_no_store and len({text.partition("\n")[2] if dead else text for text in texts}) > 1:
        problems.append("texts differ: " + " | ".join(text[:300] for text in texts))
    pattern = case.fault.match.format(rank=faulty)
    problems.extend(f"no {pattern!r} in: {text[:300]}" for text in texts if not re.search(pattern, text, re.DOTALL))
    if expect == "interrupted" and faulty in raised and raised[faulty].kind != "KeyboardInterrupt":
        problems.append(f"no KeyboardInterrupt: {_spelled(raised[faulty])}")
    if verdict.seconds is not None and verdict.seconds > case.fault.limit_s:
        problems.append(f"{verdict.seconds:.1f} s, expected {case.fault.limit_s:.0f} at most")


def _different(folder: Path, target: Path) -> Path:
    """Returns a copy of a checkpoint in which the second shard has other values."""
    shutil.copytree(folder, target)
    (shard,) = target.glob(f"*{SHARD}*")
    stored = bytearray(shard.read_bytes())
    first = 8 + int.from_bytes(stored[:8], "little")
    stored[first:] = bytes(byte ^ 1 for byte in stored[first:])
    shard.write_bytes(stored)
    return target


def _outcome(answers: Mapping[int, Answer | None]) -> str:
    words = {answer.kind or "loaded" if answer is not None else "died" for answer in answers.values()}
    return "+".join(sorted(words))


def _spelled(answer: Answer) -> str:
    return f"[{answer.kind}: {answer.text[:300]} ({answer.where})]" if answer.kind else answer.digest
