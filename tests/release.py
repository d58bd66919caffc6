"""Is a release whole? `make release-check` builds it and calls this.

python tests/release.py contents FOLDER     # of the wheel and the sdist in it
python tests/release.py examples PYTHON     # run by that interpreter, in which the wheel is installed, outside of here
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "lowmem_load"
STARTUP = "lowmem_load_startup.pth"
TIMEOUT_S = 600
IMPORTS = f"import {PACKAGE} as it; [getattr(it, name) for name in it.__all__]; print(it.__file__)"

TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")

# Each is started in a copy of examples/ as its first lines say, {out} being a folder of its own.
COMMANDS = {
    "first_load": "first_load.py {model} {out}",
    "hf_trainer": "hf_trainer.py --model {model} --output {out} --steps 2",
    "hf_trainer, LoRA": "hf_trainer.py --model {model} --output {out} --steps 2 --lora",
    "trainer_fsdp2": "trainer_fsdp2.py --model {model} --output {out} --steps 2",
    "mesh_loop": "mesh_loop.py --model {model} --output {out} --steps 2",
    "accelerate": "accelerate_loop.py --model {model} --output {out} --steps 2",
    "trl_sft": "trl_sft.py --model {model} --output {out} --steps 2",
    "trl_dpo": "trl_dpo.py --model {model} --output {out} --steps 2",
    "rlhf": "rlhf.py --model {model} --steps 2",
    "partial_zero3": "partial_zero3.py --hidden-size 128 --num-layers 2 --steps 2",
    "llamafactory_style": (
        "llamafactory_style/train.py llamafactory_style/train.yaml model={model} output_dir={out} max_steps=2"
    ),
}


def problems_of_description(metadata: str) -> Iterator[str]:
    """Yield a line for each link or picture of a README in metadata that a package index has no file for."""
    description = metadata.partition("\n\n")[2]
    if not description.strip():
        yield "the wheel has no description"
    for found in re.finditer(r"!?\[[^\]]*\]\((?!https?:|#)([^)]*)\)", description):
        yield f"the description refers to {found[1]}, which an index does not have"


def tracked() -> set[str]:
    """Return the files that both have to hold: the package in the checkout, and the file for site-packages."""
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*") if path.is_file()}
    return {name for name in files if "__pycache__" not in name} | {STARTUP}


def check_contents(folder: Path) -> list[str]:
    """Return what is wrong with the one wheel and the one sdist in a folder."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
        metadata = next((name for name in in_wheel if name.endswith(".dist-info/METADATA")), None)
        described = archive.read(metadata).decode() if metadata else ""
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive if member.isfile()}
    own = {name for name in in_wheel if ".dist-info/" not in name}
    foreign = {name for name in in_sdist if name.startswith(("tests/", "benchmarks/", "docs/", "examples/"))}
    about = {name.partition(".dist-info/")[2] for name in in_wheel}
    needed = tracked() | {"LICENSE", "README.md", "pyproject.toml", "setup.py"}
    return [
        *(f"the wheel lacks {name}" for name in sorted(tracked() - own)),
        *(f"the wheel lacks its {name}" for name in {"METADATA", "entry_points.txt", "licenses/LICENSE"} - about),
        *(f"the wheel has {name}" for name in sorted(own - tracked())),
        *(f"the sdist lacks {name}" for name in sorted(needed - in_sdist)),
        *(f"the sdist has {name}" for name in sorted(foreign)),
        *problems_of_description(described),
    ]


def run_examples(python: Path, only: list[str]) -> list[str]:
    """Run the examples (or some) with the installed wheel; return the names of those that failed."""
    with tempfile.TemporaryDirectory(prefix="lowmem-release-") as name:
        folder = Path(name)
        shutil.copytree(ROOT / "examples", folder / "examples")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"), "HF_HUB_OFFLINE": "1"}
        environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"

        def run(command: list[str]) -> subprocess.CompletedProcess[str]:
            outside = folder / "examples"
            return subprocess.run(
                command, cwd=outside, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )

        where = run([str(python), "-c", IMPORTS]).stdout.strip()
        if not where:
            return ["the wheel cannot be imported, or lacks one of its public names"]
        if ROOT in Path(where).parents and "site-packages" not in where:
            return [f"{where} is imported, which is the checkout and not the wheel"]
        print(f"{where}", flush=True)
        failed = []
        model = folder / "model"
        for title, command in {"make_model": f"make_model.py {model}", **COMMANDS}.items():
            if only and title not in only and title != "make_model":
                continue
            launcher = [str(python)] if title == "make_model" else [str(python), *TORCHRUN]
            start_s = time.monotonic()
            done = run([*launcher, *command.format(model=model, out=folder / title.replace(", ", "-")).split()])
            print(f"{title}: exit {done.returncode} after {time.monotonic() - start_s:.0f} s", flush=True)
            if done.returncode:
                failed.append(f"{title}:\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}")
        return failed


def main() -> None:
    """Do what the command line asks for; exit with 1 where something is wrong."""
    what, path, *only = sys.argv[1:]
    found = check_contents(Path(path)) if what == "contents" else run_examples(Path(path).absolute(), only)
    print(*(found or [f"{what}: nothing wrong"]), sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
