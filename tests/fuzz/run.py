"""The long campaign: `python -m tests.fuzz.run --target pickle --seconds 600`, or `make fuzz`.

With atheris installed (`pip install atheris`) mutation is guided by coverage; without it inputs are mutated at random
from the corpus. Inputs that reach new code go to `--corpus`, findings to `--findings`, one for each message.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

INSTRUMENTED = ("lowmem_load.formats", "lowmem_load.config", "lowmem_load.hf.names", "lowmem_load.ds.zero3_target")
HOME = Path(__file__).resolve().parents[2] / ".cache" / "fuzz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", help="by name; all of them when absent")
    parser.add_argument("--seconds", type=float, default=60, help="per target")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1, 1 << 31), help="printed")
    parser.add_argument("--corpus", type=Path, default=HOME / "corpus")
    parser.add_argument("--findings", type=Path, default=HOME / "findings")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # a process of atheris
    options = parser.parse_args()
    if options.inside:
        _guided(options.target[0], options)
        return
    from tests.fuzz.targets import TARGETS

    print(f"seed {options.seed}", flush=True)
    found = False
    for name in options.target or TARGETS:
        for folder in (options.corpus, options.findings):
            (folder / name).mkdir(parents=True, exist_ok=True)
        before = set((options.findings / name).iterdir())
        start = time.perf_counter()
        num_inputs = _campaign(name, options)
        seconds = time.perf_counter() - start
        new = set((options.findings / name).iterdir()) - before
        found = found or bool(new)
        print(f"{name}: {num_inputs} inputs in {seconds:.0f} s, {len(new)} new findings", *sorted(new), flush=True)
    sys.exit(found)


def _campaign(name: str, options: argparse.Namespace) -> int:
    """Return the number of inputs that were run."""
    if importlib.util.find_spec("atheris") is None:
        return _random(name, options)
    command = [sys.executable, "-m", "tests.fuzz.run", "--inside", "--target", name]
    for option in ("seconds", "seed", "corpus", "findings"):
        command += [f"--{option}", str(getattr(options, option))]
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:  # libFuzzer does not clean up
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env={**os.environ, "TMPDIR": folder},
        )
    counts = re.findall(r"Done (\d+) runs|^#(\d+)\s", done.stdout, re.MULTILINE)
    (options.findings / f"{name}.log").write_text(done.stdout)
    if done.returncode:  # a crash of the interpreter, memory, a hang: libFuzzer has kept the input
        (options.findings / name / "exit").write_text(done.stdout[-4000:])
    return max((int(done or seen) for done, seen in counts), default=0)


def _random(name: str, options: argparse.Namespace) -> int:
    from tests.fuzz.mutate import mutated
    from tests.fuzz.targets import CORPUS, MAX_NBYTES, TARGETS, Finding, check

    rng, target = random.Random(options.seed), TARGETS[name]
    corpus = [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]
    count, end = 0, time.monotonic() + options.seconds
    while time.monotonic() < end:
        data = mutated(rng.choice(corpus), target.kind, target.words, corpus, rng)[:MAX_NBYTES]
        count += 1
        try:
            check(name, data)
        except Finding as finding:
            _keep(finding, data, options.findings / name)
    return count


def _guided(name: str, options: argparse.Namespace) -> None:
    import atheris

    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from tests.fuzz.targets import CORPUS, MAX_NBYTES, TARGETS, Finding, check
    from tests.fuzz.mutate import mutated

    target = TARGETS[name]
    others = [file.read_bytes() for file in sorted((CORPUS / name).iterdir())]

    def one_input(data: bytes) -> None:
        try:
            check(name, data)
        except Finding as finding:
            _keep(finding, data, options.findings / name)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        if seed % 4:  # ours knows the format, and takes ten times as long
            return bytes(atheris.Mutate(data, max_size))
        return mutated(data, target.kind, target.words, others, random.Random(seed))[:max_size]

    arguments = [
        *(
            "fuzz",
            str(options.corpus / name),
            str(CORPUS / name),
            f"-max_len={MAX_NBYTES}",
            f"-seed={options.seed}",
        ),
        *(f"-max_total_time={int(options.seconds)}", "-rss_limit_mb=3000", "-timeout=20", "-print_final_stats=1"),
        f"-artifact_prefix={options.findings / name}/",
    ]
    atheris.Setup(arguments, one_input, custom_mutator=mutator)
    atheris.Fuzz()


def _keep(finding: Exception, data: bytes, folder: Path) -> None:
    """Write an input down unless one with such a message is there: numbers and names differ, words do not."""
    words = re.sub(r"'[^']*'|\"[^\"]*\"|[0-9.]+", "", str(finding))[:120]
    path = folder / f"{zlib.crc32(words.encode()):08x}"
    if not path.exists():
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(f"{finding}\n{type(finding.__cause__).__name__}: {finding.__cause__}\n")


if __name__ == "__main__":
    main()
