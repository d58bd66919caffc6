"""The command `lowmem-load`: its subcommands, their answers as tables or JSON, and its exit codes.

Heavy modules are imported by the subcommands that need them, when they run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version as distribution_version
from pathlib import Path
from typing import Annotated, Any

import typer

from lowmem_load.errors import CheckpointError, ConfigError, IncompatibleVersionError, LowMemLoadError, UnsupportedError
from lowmem_load.integrations.startup_hook import switched_on

FOUND, USAGE, CHECKPOINT, UNSUPPORTED, FAILED = 1, 2, 3, 4, 5
"""Exit codes: a problem was found; unusable arguments or ds_config; an unusable
checkpoint; an unsupported combination or release; any other error."""

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of `run`, as in shells."""

DTYPES = ("float64", "float32", "float16", "bfloat16")

app = typer.Typer(
    name="lowmem-load",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help text: rich is slow to import
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"lowmem-load {distribution_version('lowmem-load')}")
        raise typer.Exit


@app.callback()
def lowmem_load(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Load Hugging Face models straight into DeepSpeed ZeRO-3 partitions and FSDP2 shards.

    Exit codes: 0 done; 1 there is a problem; 2 wrong arguments or ds_config; 3 the checkpoint cannot be used; 4 not
    supported; 5 another error; 130 interrupted. `run` exits with the code of its command.
    """


# -- subcommands -------------------------------------------------------------------------------------------------------


@app.command()
def plan(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A folder, a Hub id or a URL.", show_default=False)],
    ds_config: Annotated[
        Path | None, typer.Option(help="JSON file, for ZeRO. Default: stage 3 in bf16.", exists=True, dir_okay=False)
    ] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Number of ranks of a ZeRO job.")] = None,
    fsdp: Annotated[int | None, typer.Option(min=1, help="Number of ranks that share a parameter under FSDP2.")] = None,
    tp: Annotated[
        int, typer.Option(min=1, help="Number of ranks that split a layer (tensor parallelism), with --fsdp.")
    ] = 1,
    ep: Annotated[
        int, typer.Option(min=1, help="Number of ranks that share the experts (expert parallelism), with --fsdp.")
    ] = 1,
    dp_replicate: Annotated[int, typer.Option(min=1, help="Number of replicas (HSDP), with --fsdp.")] = 1,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks on a node. Default: 8, or all if there are fewer.")
    ] = None,
    four_bit: Annotated[bool, typer.Option("--four-bit", help="Quantize to 4 bits, for QLoRA.")] = False,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="Dequantize an fp8, mxfp4 or compressed-tensors checkpoint.")
    ] = False,
    subfolder: Annotated[str, typer.Option(help="Subfolder that has the weights.")] = "",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    auto_class: Annotated[
        str | None, typer.Option(help="Class of transformers to load with. Default: the one that config.json names.")
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the checkpoint.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a load reads and needs on each rank.

    It reads headers only, also those of a model on the Hub, which is not downloaded.

    \b
    lowmem-load plan /models/Llama-3.1-70B --world-size 8
    lowmem-load plan /models/Llama-3.1-70B --fsdp 64 --tp 8
    """
    if fsdp is None and max(tp, ep, dp_replicate) > 1:
        raise typer.BadParameter("--tp, --ep and --dp-replicate go with --fsdp")
    if (fsdp is None) == (world_size is None) or (fsdp and ds_config):
        raise typer.BadParameter("name --world-size for ZeRO (and --ds-config), or --fsdp for FSDP2")
    if four_bit and dequantize:
        raise typer.BadParameter("pass --four-bit or --dequantize, not both")
    if revision is not None and ("://" in name or os.path.isdir(name)):
        kind = "URL" if "://" in name else "local folder"
        raise ConfigError(f"--revision {revision}: {name} is a {kind}, which has no revisions; drop the option")
    mesh = {"fsdp_size": fsdp, "tp_size": tp, "ep_size": ep, "dp_replicate_size": dp_replicate} if fsdp else None
    num_ranks = world_size or (fsdp or 1) * tp * dp_replicate
    with working():
        from lowmem_load.cli.plan import Job, needs_of

        options = {"subfolder": subfolder, "auto_class": auto_class, "trust_remote_code": trust_remote_code}
        job = Job(num_ranks, min(gpus_per_node or 8, num_ranks), mesh, str(ds_config) if ds_config else None)
        found = needs_of(name, job, revision=revision, four_bit=four_bit, dequantize=dequantize, **options)
    answer(as_json, found, lambda: f"{found['name']}\n{table(found['about'].items())}")


@app.command()
def doctor(
    store: Annotated[str, typer.Option(help="HOST:PORT of a running job, its MASTER_ADDR and MASTER_PORT.")] = "",
    as_json: Json = False,
) -> None:
    """Check this machine, or the ranks of a running job.

    It compares versions with the supported ones, and looks for the compiler that DeepSpeed needs on CPUs and for locks
    of killed builds. It says what to do about each problem, and then exits with 1. Run it where the job will run.

    With --store it prints at which step each rank of a running job is, and since when.

    \b
    lowmem-load doctor --json
    lowmem-load doctor --store node1:29500
    srun --nodes 2 --ntasks-per-node 1 lowmem-load doctor
    """
    if store:
        _show_steps(store, as_json)
        return
    with working():
        from lowmem_load.cli.doctor import PROBLEM, check_compiler, check_locks, check_versions

        findings = [*check_versions(), *check_compiler(), *check_locks()]
    num_problems = sum(finding.level == PROBLEM for finding in findings)
    summary = f"{num_problems} problem{'s' * (num_problems > 1)}" if num_problems else "No problem in what was checked."
    rows = [(finding.level, finding.area, f"{finding.text}  {finding.advice}") for finding in findings]
    answer(as_json, [asdict(finding) for finding in findings], lambda: f"{table(rows)}\n{summary}")
    if num_problems:
        raise typer.Exit(FOUND)


def _show_steps(store: str, as_json: bool) -> None:
    """Print what the ranks that meet in a store wrote last about themselves."""
    host, _, port = store.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--store: {store!r} is not HOST:PORT, such as node1:29500")
    with working():
        from lowmem_load.distributed.process_group import look_into

        seen = look_into(host, int(port))
    rows = [("prefix", "rank", "step", "does", "since", "process")]
    for one in seen:
        does = one["does"] + (" (no heartbeat)" if one["silent"] else "")
        rows.append((one["prefix"], str(one["rank"]), one["step"], does, f"{one['seconds']:.0f} s", one["who"]))
    answer(as_json, seen, lambda: f"{table(rows)}\n{len(seen)} ranks")


@app.command()
def consolidate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder or URL that the trainer saved to.", show_default=False)
    ],
    output: Annotated[
        str,
        typer.Argument(metavar="OUTPUT", help="Folder to create, also in s3://, gs:// or az://.", show_default=False),
    ],
    tag: Annotated[
        str | None, typer.Option(help="Tag of a DeepSpeed checkpoint. Default: the one in its file `latest`.")
    ] = None,
    part: Annotated[
        str | None, typer.Option(help="Part of the state dict to convert, e.g. ema. Default: the model.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of the weights, e.g. bfloat16. Default: as saved; float32 for ZeRO.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest size of a file.")] = "5GB",
    config: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub id of the model, or none to keep the names. Default: the checkpoint's config.json."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a folder that is not empty.")] = False,
    as_json: Json = False,
) -> None:
    """Convert a training checkpoint to a Hugging Face folder.

    It accepts checkpoints of DeepSpeed's ZeRO, of torch DCP (accelerate, Trainer, TRL, axolotl, LLaMA-Factory,
    torchtitan) and of verl. It does not need a GPU. Processes that torchrun starts share the work.

    \b
    lowmem-load consolidate out/checkpoint-500 out/model --dtype bfloat16 --config meta-llama/Llama-3.1-8B
    torchrun --nproc-per-node 8 -m lowmem_load consolidate out/checkpoint-500 out/model
    """
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    with working():
        if not overwrite and _files_in(output):
            raise ConfigError(f"{output}: is not empty; name another folder, or pass --overwrite")
        import torch

        from lowmem_load.distributed.process_group import DistributedInterface
        from lowmem_load.resume.consolidate import consolidate

        # Not by WORLD_SIZE, which pods export without ranks.
        ranks = DistributedInterface() if "TORCHELASTIC_RUN_ID" in os.environ else None
        options: dict[str, Any] = {"tag": tag, "part": part, "max_shard_size": max_shard_size, "ranks": ranks}
        options["dtype"] = None if dtype is None else getattr(torch, dtype)
        options["config"] = False if config == "none" else config
        report = consolidate(checkpoint, output, **options)
    if report.rank:
        return
    note = (
        ""
        if "config.json" in _files_in(output)
        else "\nNo config.json was written: --config names the model whose config.json to take."
    )
    answer(as_json, asdict(report), lambda: f"{report}{note}")


# Options after the command's name belong to that command.
@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND...", help="Command to start, with its arguments.", show_default=False),
    ],
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Fail instead of falling back to the default loader, and if a model is loaded too early."
        ),
    ] = False,
    no_download: Annotated[
        bool, typer.Option("--no-download", help="Read models on the Hub without downloading them to its cache.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", hidden=True)] = False,
) -> None:
    """Start a command with lowmem_load switched on.

    The command is a launcher or a script. In each process that it starts, this works like `lowmem_load.install()` at
    the top of the training script: models load straight into partitions or shards while ZeRO-3 or FSDP2 is active.
    How sharded models are saved, how ZeRO-3 checkpoints of other rank counts are resumed, and how TRL sends weights to
    vLLM change, too. LOWMEM_LOAD_INSTALL=0 turns it off for a process.

    \b
    lowmem-load run -- torchrun --nproc-per-node 8 train.py
    lowmem-load run -- accelerate launch --config_file fsdp2.yaml train.py
    """
    if stream:
        typer.echo("lowmem-load run: --stream is deprecated, and goes in 0.5: use --no-download", err=True)
    # Replace this process, so that signals and the exit code are the command's own.
    try:
        os.execvpe(command[0], command, switched_on(os.environ, strict=strict, download=not (no_download or stream)))
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        typer.echo(f"lowmem-load run: {command[0]}: {error.strerror}", err=True)
        raise typer.Exit(NOT_FOUND if is_missing else NOT_EXECUTABLE) from None


# -- answers and errors ------------------------------------------------------------------------------------------------


def _files_in(folder: str) -> set[str]:
    """Return the names in a folder, also in a store, that a conversion would write to."""
    from lowmem_load.files.store_folder import StoreFolder
    from lowmem_load.weights_out.folder import find_target, is_in_store
    from lowmem_load.weights_out.store import MARKER

    if is_in_store(folder):
        return StoreFolder(find_target(folder)).names(["."]) - {MARKER}  # of a save that was killed
    return set(os.listdir(folder)) if os.path.isdir(folder) else set()


@contextlib.contextmanager
def working() -> Iterator[None]:
    """Send what libraries print inside the block to stderr, and quieten transformers: stdout is for the answer."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with contextlib.redirect_stdout(sys.stderr):
        yield


def answer(as_json: bool, value: Any, text: Callable[[], str]) -> None:
    """Print the answer of a command: `value` as JSON, or else the text."""
    sys.stdout.write((json.dumps(value, indent=2, default=str) if as_json else printable(text())) + "\n")


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows as lines of text, cells below each other; columns without any value are left out."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in padded)


def printable(text: str) -> str:
    """Return text without characters that control a terminal: names in file headers are untrusted."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def exit_code(error: LowMemLoadError) -> int:
    """Return the exit code for an error that ends a command."""
    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, CheckpointError):
        return CHECKPOINT
    return UNSUPPORTED if isinstance(error, UnsupportedError | IncompatibleVersionError) else FAILED


def main() -> None:
    """Run the command line of this process."""
    try:
        app(prog_name="lowmem-load")
    except LowMemLoadError as error:
        print(printable(f"lowmem-load: {error}"), file=sys.stderr)  # noqa: T201
        sys.exit(exit_code(error))
    except Exception as error:  # noqa: BLE001  it is printed
        traceback.print_exception(error)
        sys.exit(FAILED)
