"""Compare real pipelines with and without lowmem_load: losses side by side, peak memory side by side.

python -m benchmarks.pipelines                       # every pipeline, a 170 MB model, 2 ranks
python -m benchmarks.pipelines --size tiny --only trl_sft trl_dpo
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launch import run_processes
from benchmarks.pipeline_worker import PipelineResult, import_example
from benchmarks.table import aligned

LLAMAFACTORY = "llamafactory_style/train"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """An example and the switches that it is run with."""

    script: str
    switches: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name in tables."""
        return " ".join((self.script.replace("/train", ""), *self.switches))

    def argv(self, model: Path, output: Path, steps: int, stock: bool) -> list[str]:
        """Return the command line of the example."""
        end = ["--stock"] if stock else []
        if self.script == LLAMAFACTORY:
            config = Path(__file__).resolve().parents[1] / "examples" / "llamafactory_style" / "train.yaml"
            settings = {"model": model, "output_dir": output, "max_steps": steps, "save_steps": 0}
            return [str(config), *(f"{key}={value}" for key, value in settings.items()), *end]
        places = ["--model", str(model), "--output", str(output)]
        return [*places, "--steps", str(steps), "--save-steps", str(steps), *self.switches, *end]


PIPELINES = [
    Pipeline("hf_trainer"),
    Pipeline("hf_trainer", ("--lora",)),
    Pipeline("accelerate_loop"),
    Pipeline("trl_sft"),
    Pipeline("trl_sft", ("--lora",)),
    Pipeline("trl_dpo"),
    Pipeline("trl_dpo", ("--lora",)),
    Pipeline(LLAMAFACTORY),
]

DEFINITIONS = """\
MiB (2**20 bytes) above the start: after imports, before the script. The larger of the ranks, each figure by itself.
load   up to the first deepspeed.initialize: all models are loaded, the reference model of DPO too.
run    the whole script: training and saving too; where training needs more than loading, that is what it shows.
peak   high-water mark of resident memory; anon and file: largest samples of its two parts. Blocks above 64 KiB are
       returned to the kernel as soon as they are freed (mallopt), so that memory in use is counted.
losses equal: bit for bit, on every rank and at every step."""

COLUMNS = ("pipeline", "method", "load peak", "anon", "file", "run peak", "anon", "file", "losses")

Run = Callable[[Pipeline, list[str], str], list[PipelineResult]]


@dataclass(slots=True)
class Comparison:
    """One pipeline, run both ways; results in rank order."""

    pipeline: Pipeline
    stock: list[PipelineResult]
    streamed: list[PipelineResult]

    @property
    def losses_equal(self) -> bool:
        """Whether all losses are, and there are any."""
        stock, streamed = ([rank.losses for rank in results] for results in (self.stock, self.streamed))
        return stock == streamed and all(stock)

    @property
    def load_peak_is_lower(self) -> bool:
        """Whether the peak while loading, of the rank that needs most, is below stock's."""
        stock, streamed = (max(r.load.high_water for r in results) for results in (self.stock, self.streamed))
        return streamed < stock


def compare(
    pipeline: Pipeline, model: Path, out: Path, steps: int, run: Run, after: Callable[[Path], None] | None = None
) -> Comparison:
    """Run one pipeline stock and streamed.

    Args:
        model: a checkpoint that examples/make_model.py wrote.
        out: where the runs leave what they write; the folders of the examples are deleted.
        after: called with the folder of each example before that.
        run: runs the pipeline with a command line on all ranks; the last argument is a name for the run.
    """
    results = []
    for stock in (True, False):
        name = f"{pipeline.name.replace(' ', '').replace('/', '-')}-{'stock' if stock else 'lowmem'}"
        output = out / f"{name}-output"
        results.append(run(pipeline, pipeline.argv(model, output, steps, stock), name))
        if after:
            after(output)
        shutil.rmtree(output, ignore_errors=True)
    return Comparison(pipeline, *results)


def table(comparisons: Sequence[Comparison]) -> list[str]:
    """Return the memory of all pipelines, then their losses, as lines of text."""
    rows: list[Sequence[str]] = [COLUMNS]
    for comparison in comparisons:
        verdict = "equal" if comparison.losses_equal else "DIFFERENT"
        rows.append([comparison.pipeline.name, "stock", *_memory(comparison.stock), ""])
        rows.append(["", "lowmem", *_memory(comparison.streamed), verdict])
    lines = aligned(rows)
    for comparison in comparisons:
        for method, results in (("stock", comparison.stock), ("lowmem", comparison.streamed)):
            losses = " ".join(f"{loss:.6f}" for loss in results[0].losses)
            lines.append(f"{comparison.pipeline.name}, {method}: {losses}")
    return lines


def _memory(results: Sequence[PipelineResult]) -> list[str]:
    figures = []
    for part in ("load", "whole"):
        of_ranks = [getattr(result, part) for result in results]
        figures += [max(rss.high_water for rss in of_ranks), max(rss.anon for rss in of_ranks)]
        figures.append(max(rss.file for rss in of_ranks))
    return [f"{figure / 2**20:.1f}" for figure in figures]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line names; return 1 when losses differ or loading takes more memory than stock."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", help="of the model, as examples/make_model.py names it")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="scripts, such as trl_sft")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "lowmem-load-pipelines")
    parser.add_argument("--gpu", action="store_true", help="ranks with one GPU each instead of CPU ranks")
    options = parser.parse_args(argv)

    model = options.out / f"model-{options.size}"
    if not model.is_dir():
        import_example("make_model").main([str(model), "--size", options.size])

    def run(pipeline: Pipeline, argv: list[str], name: str) -> list[PipelineResult]:
        print(f"running {name}", file=sys.stderr, flush=True)
        spec = {"script": pipeline.script, "argv": argv}
        texts = run_processes("benchmarks.pipeline_worker", spec, options.out / name, options.ranks, options.gpu)
        return [PipelineResult.from_json(text) for text in texts]

    wanted = [pipeline for pipeline in PIPELINES if not options.only or pipeline.script in options.only]
    comparisons = [compare(pipeline, model, options.out, options.steps, run) for pipeline in wanted]
    print(DEFINITIONS, *table(comparisons), sep="\n")
    return 0 if all(found.losses_equal and found.load_peak_is_lower for found in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
