"""Answers of the subcommands: figures of the plan, checks, exit codes; and what their start imports."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from typer import BadParameter

import lowmem_load
from lowmem_load.cli import common
from lowmem_load.cli.common import facts, table
from lowmem_load.cli.start import main
from lowmem_load.errors import CheckpointError, ConfigError, IncompatibleVersionError, RankError, UnsupportedError
from tests.builders import tiny_llama, tiny_qwen3_vl_moe
from tests.ranks import REPO

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
    plan = lowmem_load.plan(llama, config, rank=0, world_size=8, dtype=torch.float32)
    assert {name: found["costs"][name] for name in FIGURES} == {name: getattr(plan.costs, name) for name in FIGURES}
    assert found["partition_bytes"] == plan.partition_bytes < found["rows"][0]["needs"]["gpu_load"]
    assert (found["about"]["job"], found["about"]["mesh"]) == ("8 ranks on one node", "fsdp_size 4, tp_size 2")
    assert found["about"]["planned for"] == "FSDP2, on GPUs"
    assert [row["method"] for row in found["rows"]] == ["full"] * 2 + ["LoRA r16"] * 2
    assert "drop --tp" in found["about"]["QLoRA is not planned"]


def test_plan_states_the_figures_of_a_ranks_plan(answer: Answer, llama: Path, ds_config: Path) -> None:
    asked = ("plan", llama, "--ds-config", ds_config, "--world-size", 64, "--gpus-per-node", 4)
    code, found = answer(*asked, "--json")
    assert code == 0 and found["about"]["job"] == "64 ranks on 16 nodes of 4"
    plan = lowmem_load.plan(llama, DS_CONFIG, rank=0, world_size=64)
    assert {name: found["costs"][name] for name in FIGURES} == {name: getattr(plan.costs, name) for name in FIGURES}
    assert found["partition_bytes"] == plan.partition_bytes
    assert [row["verdict"] for row in found["rows"]] == [""] * len(found["rows"])


def test_plan_says_where_more_is_read_than_needed(answer: Answer, llama: Path, tmp_path: Path) -> None:
    asked = ("--world-size", 16, "--gpus-per-node", 4, "--method", "full")
    assert "read / needed" not in answer("plan", llama, *asked)[1]
    transposed = tiny_qwen3_vl_moe(tmp_path)
    costs = answer("plan", transposed, *asked, "--json")[1]["costs"]
    assert costs["read_bytes"] > costs["needed_bytes"]
    found = " ".join(answer("plan", transposed, *asked)[1].split())
    assert f"read / needed {costs['read_bytes'] / costs['needed_bytes']:.2f}: " in found


@pytest.mark.parametrize(("limit", "code", "says"), [("1TiB", 0, "fits, host"), ("1MiB", 1, "host lacks")])
def test_plan_ends_with_a_verdict(
    limit: str, code: int, says: str, answer: Answer, llama: Path, ds_config: Path
) -> None:
    asked = ("plan", llama, "--ds-config", ds_config, "--world-size", 64, "--method", "full")
    found = answer(*asked, "--host-memory", limit)
    assert found[0] == code and says in found[1] and ("1 rank" if code == 0 else "never") in found[1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--world-size", 2, "--host-memory", "lots"], ConfigError, "--host-memory: expected a size"),
        (["--world-size", 2, "--device-memory", "80"], ConfigError, "--device-memory: .* such as 80GiB, .*, got '80'"),
        (["--world-size", 2, "--revision", "main"], ConfigError, "--revision main: .* is a local folder"),
        (["--world-size", 2, "--offload", "disk"], ConfigError, "offload: expected one of none, optimizer, all"),
        (["--world-size", 2, "--method", "dpo"], ConfigError, "method: expected one of full, lora, qlora"),
        (["--fsdp", 2, "--offload", "optimizer"], ConfigError, "FSDP2: all or none"),
        (["--fsdp", 2, "--ds-config", "ds.json"], BadParameter, "or --fsdp for FSDP2"),
        (["--fsdp", 2, "--world-size", 2], BadParameter, "or --fsdp for FSDP2"),
        ([], BadParameter, "name --world-size for ZeRO-3"),
        *((["--world-size", 2, name, 2], BadParameter, "go with --fsdp") for name in OF_MESHES),
        (["--fsdp", 2, "--tp", 2, "--method", "qlora"], UnsupportedError, "sharded by FSDP2 alone; drop --tp"),
        (["--fsdp", 2, "--dequantize"], UnsupportedError, "is not quantized"),
    ],
)
def test_plan_refuses(
    options: list[Any],
    error: type[Exception],
    message: str,
    answer: Answer,
    llama: Path,
    ds_config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "qlora" in options:
        pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(ds_config.parent)
    with pytest.raises(error, match=message):
        answer("plan", llama, *options)


def test_plan_needs_no_files_of_weights(answer: Answer, llama: Path, ds_config: Path, tmp_path: Path) -> None:
    """A model that is planned by its configuration has the sizes of its files."""
    shutil.copy(llama / "config.json", tmp_path)
    plans = [answer("plan", name, "--world-size", 2, "--json")[1] for name in (llama, tmp_path)]
    assert plans[1]["name"].endswith("(config.json alone: sizes as a save would write them)")
    assert plans[0]["costs"]["needed_bytes"] == plans[1]["costs"]["needed_bytes"] > 0


def test_models_of_diffusers_are_planned(answer: Answer, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    model.save_pretrained(tmp_path / "vae")
    (tmp_path / "config").mkdir()
    shutil.copy(tmp_path / "vae" / "config.json", tmp_path / "config")
    names = (tmp_path / "vae", tmp_path / "config")
    plans = [answer("plan", name, "--world-size", 2, "--json")[1] for name in names]
    assert plans[0]["about"]["QLoRA is not planned"] == "diffusers itself quantizes its models"
    assert plans[0]["costs"]["needed_bytes"] == plans[1]["costs"]["needed_bytes"] > 0
    assert answer("plan", names[0], "--fsdp", 2, "--json")[1]["costs"]["needed_bytes"] > 0
    with pytest.raises(UnsupportedError, match="diffusers is sharded by FSDP2 alone"):
        answer("plan", names[0], "--fsdp", 2, "--tp", 2)


def test_plan_says_what_deepspeed_ignores_and_what_no_file_has(
    answer: Answer, llama: Path, ds_config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = ("plan", llama, "--ds-config", ds_config, "--world-size", 2)
    ds_config.write_text(json.dumps({**DS_CONFIG, "zero_optimization": {"stage": 2}}))
    with pytest.raises(UnsupportedError, match=r"zero_optimization\.stage 2: needs are estimated for stage 3"):
        answer(*asked)
    ds_config.write_text(json.dumps({"zero_optimization": {"stage": 3}, "train_micro_batchsize_per_gpu": 1}))
    assert "in no file" not in answer(*asked)[1]
    assert "did you mean train_micro_batch_size_per_gpu?" in caplog.text
    assert "Is the model's class right" in answer(*asked, "--auto-class", "BertModel")[1]


def test_without_bitsandbytes_the_other_rows_are_shown(
    answer: Answer, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowmem_load.api.forecast.find_spec", lambda name: None)
    text = answer("plan", llama, "--world-size", 2)[1]
    assert "LoRA r16" in text and "QLoRA r16" not in text and "it needs bitsandbytes" in text
    with pytest.raises(UnsupportedError, match="needs bitsandbytes"):
        answer("plan", llama, "--world-size", 2, "--method", "qlora")


@pytest.mark.parametrize(("sharding", "offloads"), [(["--world-size", 2], 3), (["--fsdp", 2], 2)])
def test_plan_compares_ways_to_train(sharding: list[Any], offloads: int, answer: Answer, llama: Path) -> None:
    pytest.importorskip("bitsandbytes")
    code, found = answer("plan", llama, *sharding, "--device-memory", "24MiB", "--json")
    rows = found["rows"]
    assert [row["method"] for row in rows] == ["full"] * offloads + ["LoRA r16"] * 2 + ["QLoRA r16"] * 2
    assert code == (0 if any(row["fits"] for row in rows) else 1)
    training = [row["needs"]["gpu_training"] for row in rows]
    assert training[0] > training[offloads - 1] and training[0] > training[offloads] > training[offloads + 1]
    assert "fits from" in answer("plan", llama, *sharding, "--device-memory", "24MiB")[1]


def test_plan_counts_adapters_and_takes_the_offload_of_the_ds_config(
    answer: Answer, llama: Path, ds_config: Path
) -> None:
    def gpu_training(rank: int) -> int:
        asked = ("--world-size", 2, "--method", "lora", "--lora-rank", rank, "--offload", "none", "--json")
        (row,) = answer("plan", llama, *asked)[1]["rows"]
        return int(row["needs"]["gpu_training"])

    config = LlamaConfig.from_pretrained(llama)
    linears = [module for module in LlamaForCausalLM(config).model.modules() if isinstance(module, torch.nn.Linear)]
    elements = sum(linear.in_features + linear.out_features for linear in linears)
    assert gpu_training(3) - gpu_training(2) == gpu_training(2) - gpu_training(1) == elements * (2 + 4 + 12) // 2
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    ds_config.write_text(json.dumps({**DS_CONFIG, "zero_optimization": zero}))
    asked = ("plan", llama, "--ds-config", ds_config, "--world-size", 2, "--method", "full", "--json")
    assert [row["offload"] for row in answer(*asked)[1]["rows"]] == ["optimizer"]


@pytest.mark.parametrize("becomes", [KeyboardInterrupt, ImportError, SystemExit])
def test_an_interrupt_exits_with_130_even_if_a_library_converts_it(
    becomes: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise becomes(1) from error

    monkeypatch.setattr("lowmem_load.cli.start.app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_names_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    common.answer(
        False, None, lambda: [table("t\x1b[2J", ("name",), [("a\x1b[31mb",)]), facts("", {"x\x07": "y\u202e"})]
    )
    shown = capsys.readouterr().out
    assert "t\\x1b[2J" in shown and "a\\x1b[31mb" in shown and "x\\x07" in shown and "y\\u202e" in shown


def test_errors_have_their_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = (ConfigError(""), CheckpointError(""), UnsupportedError(""), IncompatibleVersionError(""))
    assert list(map(common.exit_code, (*errors, RankError("", {})))) == [2, 3, 4, 4, 5]
    monkeypatch.setattr(sys, "argv", ["lowmem-load", "plan", str(tmp_path), "--world-size", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (common.CHECKPOINT, "")
    assert told.err.startswith(f"lowmem-load: {tmp_path}") and "the folder is empty" in told.err
    monkeypatch.setattr(sys, "argv", ["lowmem-load", "plan", f"{tmp_path}/\x1b[2J", "--world-size", "2"])
    with pytest.raises(SystemExit):
        main()
    assert "\\x1b[2J" in capsys.readouterr().err  # names of files are untrusted
    monkeypatch.setattr("lowmem_load.cli.start.app", lambda **_: 1 // 0)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 5 and "ZeroDivisionError" in capsys.readouterr().err
