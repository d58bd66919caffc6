"""The command lowmem-load: it starts fast, `run` replaces it, and its answers are those of a plan."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer import BadParameter

import lowmem_load
from lowmem_load.cli import doctor, start
from lowmem_load.cli.doctor import NOTE, OK, PROBLEM, Finding
from lowmem_load.cli.start import app, main, table
from lowmem_load.errors import CheckpointError, ConfigError, IncompatibleVersionError, RankError, UnsupportedError
from lowmem_load.integrations.startup_hook import FOLDER, SWITCH
from tests.builders import tiny_llama, tiny_qwen3_vl_moe
from tests.ranks import REPO

COMMAND = [sys.executable, "-m", "lowmem_load"]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", SWITCH)}
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**environment, **env},
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_subcommands_and_the_version_are_shown() -> None:
    found = run()
    assert "Usage: lowmem-load [OPTIONS] COMMAND" in found.stdout + found.stderr
    assert "  run  " in found.stdout + found.stderr
    assert run("--version").stdout == f"lowmem-load {lowmem_load.__version__}\n"
    assert lowmem_load.__version__ == version("lowmem-load")


def test_arguments_are_named_in_upper_case() -> None:
    commands: Any = typer.main.get_command(start.app)
    arguments = [each for command in commands.commands.values() for each in command.params if "-" not in each.opts[0]]
    assert [each.metavar for each in arguments if each.metavar != str(each.metavar).upper()] == []
    assert len(arguments) == 4


@pytest.mark.parametrize(
    ("options", "value"),
    [([], "1"), (["--"], "1"), (["--strict"], "strict"), (["--no-download", "--strict", "--"], "strict,no-download")],
)
def test_run_passes_arguments_unchanged_and_returns_the_exit_code(options: list[str], value: str) -> None:
    script = f'printf "%s|" "$@" "$PYTHONPATH" "${SWITCH}"; exit 7'
    arguments = ["--help", "--strict", "a b", "--", ""]
    found = run("run", *options, "sh", "-c", script, "sh", *arguments, PYTHONPATH="/a 'b'")
    assert found.stdout == "|".join([*arguments, f"{FOLDER}:/a 'b'", value, ""])
    assert (found.returncode, found.stderr) == (7, "")


def test_run_replaces_the_process() -> None:
    started = subprocess.Popen(
        [*COMMAND, "run", "--", "sh", "-c", "echo $$; exec sleep 60"], cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    try:
        assert started.stdout is not None
        assert int(started.stdout.readline()) == started.pid
        started.terminate()
        assert started.wait(30) == -15
    finally:
        started.kill()
        started.communicate()


def test_run_names_a_command_that_cannot_be_executed(tmp_path: Path) -> None:
    missing = run("run", "no-such-launcher", "--nproc", "2")
    assert missing.returncode == 127
    assert missing.stderr == "lowmem-load run: no-such-launcher: No such file or directory\n"
    refused = run("run", str(tmp_path))
    assert (refused.returncode, refused.stderr) == (126, f"lowmem-load run: {tmp_path}: Permission denied\n")
    assert run("run").returncode == 2


# -- answers: figures of the plan, exit codes, and what the start imports ----------------------------------------------


Answer = Callable[..., tuple[int, Any]]
DS_CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
COMMANDS = ["consolidate", "doctor", "plan", "run"]
OF_MESHES = ("--tp", "--ep", "--dp-replicate")


@pytest.fixture
def ds_config(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DS_CONFIG))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


def test_help_of_every_command_imports_little_and_has_an_example() -> None:
    source = (
        "import sys; from lowmem_load.cli.start import app\n"
        f"for name in {COMMANDS}:\n    app([name, '--help'], standalone_mode=False)\n"
        "print({m.split('.')[0] for m in sys.modules} & {'torch', 'numpy', 'transformers', 'deepspeed', 'rich'})"
    )
    found = subprocess.run([sys.executable, "-c", source], cwd=REPO, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "set()"
    assert all(f"\n  lowmem-load {name} " in found.stdout for name in COMMANDS)


FIGURES = ("needed_bytes", "read_bytes", "num_reads")


def test_plan_of_a_mesh_states_the_figures_of_a_ranks_plan(answer: Answer, llama: Path) -> None:
    from transformers.distributed import DistributedConfig

    code, found = answer("plan", llama, "--fsdp", 4, "--tp", 2, "--json")
    assert code == 0
    config = DistributedConfig(fsdp_size=4, tp_size=2)
    plan = lowmem_load.plan(llama, distributed_config=config, rank=0, world_size=8)
    assert {name: found["costs"][name] for name in FIGURES} == {name: getattr(plan.costs, name) for name in FIGURES}
    assert found["partition_bytes"] == plan.partition_bytes < found["device_bytes"]
    assert (found["about"]["job"], found["about"]["mesh"]) == ("8 ranks on one node", "fsdp_size 4, tp_size 2")
    assert found["about"]["planned for"] == "FSDP2, on GPUs"


def test_plan_states_the_figures_of_a_ranks_plan(answer: Answer, llama: Path, ds_config: Path) -> None:
    asked = ("plan", llama, "--ds-config", ds_config, "--world-size", 64, "--gpus-per-node", 4)
    code, found = answer(*asked, "--json")
    assert code == 0 and found["about"]["job"] == "64 ranks on 16 nodes of 4"
    plan = lowmem_load.plan(llama, DS_CONFIG, rank=0, world_size=64)
    assert {name: found["costs"][name] for name in FIGURES} == {name: getattr(plan.costs, name) for name in FIGURES}
    assert found["partition_bytes"] == plan.partition_bytes


@pytest.mark.parametrize("key", [{}, {"sequence_parallel_size": 2}, {"train_batch_size": 32}])
def test_plan_takes_a_trainers_ds_config(key: dict[str, int], answer: Answer, llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(json.loads((REPO / "examples" / "ds_z3.json").read_text()) | key))  # batches are "auto"
    assert answer("plan", llama, "--ds-config", path, "--world-size", 8)[0] == 0


def test_plan_says_where_more_is_read_than_needed(answer: Answer, llama: Path, tmp_path: Path) -> None:
    asked = ("--world-size", 16, "--gpus-per-node", 4)
    assert "read / needed" not in answer("plan", llama, *asked)[1]
    transposed = tiny_qwen3_vl_moe(tmp_path)
    costs = answer("plan", transposed, *asked, "--json")[1]["costs"]
    assert costs["read_bytes"] > costs["needed_bytes"]
    found = " ".join(answer("plan", transposed, *asked)[1].split())
    assert f"read / needed {costs['read_bytes'] / costs['needed_bytes']:.2f}: " in found


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--world-size", 2, "--revision", "main"], ConfigError, "--revision main: .* is a local folder"),
        (["--world-size", 2, "--four-bit", "--dequantize"], BadParameter, "not both"),
        (["--fsdp", 2, "--ds-config", __file__], BadParameter, "or --fsdp for FSDP2"),
        (["--fsdp", 2, "--world-size", 2], BadParameter, "or --fsdp for FSDP2"),
        ([], BadParameter, "name --world-size for ZeRO"),
        *((["--world-size", 2, name, 2], BadParameter, "go with --fsdp") for name in OF_MESHES),
        (["--fsdp", 2, "--tp", 2, "--four-bit"], UnsupportedError, "sharded by FSDP2 alone; drop --tp"),
        (["--fsdp", 2, "--dequantize"], UnsupportedError, "is not quantized"),
    ],
)
def test_plan_refuses(options: list[Any], error: type[Exception], message: str, answer: Answer, llama: Path) -> None:
    with pytest.raises(error, match=message):
        answer("plan", llama, *options)


def test_models_of_diffusers_are_planned(answer: Answer, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    model.save_pretrained(tmp_path / "vae")
    vae = tmp_path / "vae"
    for ranks in ("--world-size", "--fsdp"):
        assert answer("plan", vae, ranks, 2, "--json")[1]["costs"]["needed_bytes"] > 0
    with pytest.raises(UnsupportedError, match="diffusers itself quantizes its models"):
        answer("plan", vae, "--world-size", 2, "--four-bit")
    with pytest.raises(UnsupportedError, match="diffusers is sharded by FSDP2 alone"):
        answer("plan", vae, "--fsdp", 2, "--tp", 2)


def test_plan_says_what_no_file_has(answer: Answer, llama: Path, ds_config: Path) -> None:
    asked = ("plan", llama, "--ds-config", ds_config, "--world-size", 2)
    assert "in no file" not in answer(*asked)[1]
    found = answer(*asked, "--auto-class", "BertModel", "--json")[1]
    assert "Is the model's class right" in found["about"]["in no file"] and found["about"]["not in the model"]
    assert found["missing_keys"] and found["unexpected_keys"]


def test_plan_says_where_partitions_lie_and_what_the_load_takes(answer: Answer, llama: Path, tmp_path: Path) -> None:
    def planned(**zero: Any) -> Any:
        (tmp_path / "ds.json").write_text(json.dumps({**DS_CONFIG, "zero_optimization": {"stage": 3, **zero}}))
        return answer("plan", llama, "--ds-config", tmp_path / "ds.json", "--world-size", 2, "--json")[1]

    on_gpu, on_host = planned(), planned(offload_param={"device": "cpu"})
    held = on_gpu["partition_bytes"]
    assert on_host["partition_bytes"] == held > 0
    assert on_host["host_bytes"] - on_gpu["host_bytes"] == on_gpu["device_bytes"] - on_host["device_bytes"] == held
    assert "in host memory" in on_host["about"]["rank 0 owns"] and "in GPU memory" in on_gpu["about"]["rank 0 owns"]
    full = planned(stage=2)
    assert (full["partition_bytes"], full["about"]["planned for"]) == (0, "ZeRO-2, on GPUs")
    assert full["device_bytes"] > on_gpu["device_bytes"]


@pytest.mark.parametrize("sharding", ["--world-size", "--fsdp"])
def test_plan_of_four_bits(sharding: str, answer: Answer, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    plain, packed = (answer("plan", llama, sharding, 2, *more, "--json")[1] for more in ([], ["--four-bit"]))
    assert packed["partition_bytes"] < plain["partition_bytes"] and "in 4 bits" in packed["about"]["model"]
    assert packed["about"]["model"].split()[0] == plain["about"]["model"].split()[0]
    monkeypatch.setattr("lowmem_load.cli.plan.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="needs bitsandbytes"):
        answer("plan", llama, sharding, 2, "--four-bit")


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(start, "working", lambda: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(sys, "argv", ["lowmem-load", "doctor"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "")


def test_names_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    start.answer(False, None, lambda: "t\x1b[2J\n" + table([("a\x1b[31mb", ""), ("x\x07", "y\u202e")]))
    shown = capsys.readouterr().out
    assert "t\\x1b[2J" in shown and "a\\x1b[31mb" in shown and "x\\x07" in shown and "y\\u202e" in shown


def test_errors_have_their_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = (ConfigError(""), CheckpointError(""), UnsupportedError(""), IncompatibleVersionError(""))
    assert list(map(start.exit_code, (*errors, RankError("", {})))) == [2, 3, 4, 4, 5]
    monkeypatch.setattr(sys, "argv", ["lowmem-load", "plan", str(tmp_path), "--world-size", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (start.CHECKPOINT, "")
    assert told.err.startswith(f"lowmem-load: {tmp_path}") and "the folder is empty" in told.err
    monkeypatch.setattr(sys, "argv", ["lowmem-load", "plan", f"{tmp_path}/\x1b[2J", "--world-size", "2"])
    with pytest.raises(SystemExit):
        main()
    assert "\\x1b[2J" in capsys.readouterr().err  # names of files are untrusted
    monkeypatch.setattr("lowmem_load.cli.start.app", lambda **_: 1 // 0)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 5 and "ZeroDivisionError" in capsys.readouterr().err


# -- doctor: each finding has a cause, and no finding stops the other checks -------------------------------------------


def about(findings: list[Finding], text: str) -> list[str]:
    return [finding.level for finding in findings if text in finding.text]


def test_releases_are_compared_with_supported_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {finding.level for finding in doctor.check_versions()} == {OK}

    def version(package: str) -> str:
        if package == "accelerate":
            raise importlib.metadata.PackageNotFoundError(package)
        return {"torch": "2.0.1+cpu", "deepspeed": "99.0"}.get(package, "5.6.0")

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr("lowmem_load.foreign_names.installed_release", version)
    findings = list(doctor.check_versions())
    assert about(findings, "torch 2.0.1") == [PROBLEM] and about(findings, "deepspeed 99.0, tested 0.") == [NOTE]
    assert about(findings, "transformers 5.6.0") == [OK] and about(findings, "accelerate is not installed") == [PROBLEM]


def test_a_machine_of_cpus_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert {finding.level for finding in doctor.check_compiler()} == {OK}
    monkeypatch.setenv("CXX", "'c++")
    assert about(list(doctor.check_compiler()), "does not run (No closing quotation)") == [PROBLEM]
    monkeypatch.setenv("CXX", "false")
    assert about(list(doctor.check_compiler()), "false does not run (Command") == [PROBLEM]
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    findings = list(doctor.check_compiler())
    assert [finding.level for finding in findings] == [PROBLEM, PROBLEM]
    assert about(findings, "ninja does not run") == [PROBLEM]


def test_the_command_ends_with_1_where_there_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding("a", OK, "fine"), Finding("b", PROBLEM, "broken [x]", "fix it")]
    monkeypatch.setattr(doctor, "check_versions", lambda: found)
    monkeypatch.setattr(doctor, "check_compiler", list)
    monkeypatch.setattr(doctor, "check_locks", list)
    assert app(["doctor"], standalone_mode=False) == 1
    told = capsys.readouterr().out
    assert "broken [x]" in told and "fix it" in told and "fine" in told
    found.pop()
    assert not app(["doctor", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == [{"area": "a", "level": "ok", "text": "fine", "advice": ""}]


def test_the_steps_of_a_job_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("node1", "node1:", ":29500", "node1:²"):
        with pytest.raises(ConfigError, match="is not HOST:PORT"):
            app(["doctor", "--store", wrong], standalone_mode=False)
    beat = {"who": "pid 7 on node1", "step": "0123/5", "title": "tiny: reading", "seconds": 12.3}
    seen = [{"prefix": "lowmem_load", "rank": 1, "silent": True, "does": "while tiny: reading", **beat}]
    monkeypatch.setattr("lowmem_load.distributed.process_group.look_into", lambda host, port: seen)
    assert not app(["doctor", "--store", "node1:29500"], standalone_mode=False)
    assert "tiny: reading" in capsys.readouterr().out
    assert not app(["doctor", "--store", "node1:29500", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)[0]["title"] == "tiny: reading"


def test_the_lock_of_a_killed_build_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert not about(list(doctor.check_locks()), str(lock)), "another process may build there"
    os.utime(lock, (time.time() - 7200,) * 2)
    assert about(list(doctor.check_locks()), f"{lock}: is 120 minutes old") == [PROBLEM]
