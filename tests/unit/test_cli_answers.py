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
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer import BadParameter

import lowmem_load
from lowmem_load.cli import common
from lowmem_load.cli.common import facts, table
from lowmem_load.cli.start import main
from lowmem_load.errors import CheckpointError, ConfigError, IncompatibleVersionError, RankError, UnsupportedError
from lowmem_load.text import size
from tests.builders import tiny_llama, tiny_mixtral, tiny_qwen2_tied, tiny_qwen3_vl_moe
from tests.ranks import REPO

Answer = Callable[..., tuple[int, Any]]
DS_CONFIG = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
COMMANDS = ["consolidate", "doctor", "inspect", "plan", "run"]
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


def test_plan_of_a_mesh_states_the_figures_of_a_ranks_plan(answer: Answer, llama: Path) -> None:
    from transformers.distributed import DistributedConfig

    code, found = answer("plan", llama, "--fsdp", 4, "--tp", 2, "--json")
    assert code == 0
    config = DistributedConfig(fsdp_size=4, tp_size=2)
    plan = lowmem_load.plan(llama, config, rank=0, world_size=8, dtype=torch.float32)
    names = ("needed_bytes", "read_bytes", "num_reads")
    assert {name: found["costs"][name] for name in names} == {name: getattr(plan.costs, name) for name in names}
    needs = [need["needed_bytes"] for need in found["needs"] if "reads" not in need["what"]]
    assert needs[0] == plan.partition_bytes < needs[-1]
    assert (found["about"]["job"], found["about"]["mesh"]) == ("8 ranks on one node", "fsdp_size 4, tp_size 2")
    assert found["about"]["planned for"] == "full training under FSDP2, on GPUs (cuda)"
    code, found = answer("plan", llama, "--fsdp", 4, "--device-memory", "1kB", "--json")
    assert (code, found["fits"]) == (1, False)


def test_plan_states_the_figures_of_a_ranks_plan(answer: Answer, llama: Path, ds_config: Path) -> None:
    code, found = answer("plan", llama, "--ds-config", ds_config, "--world-size", 3, "--json")
    assert code == 0
    plan, stated = lowmem_load.plan(llama, DS_CONFIG, rank=0, world_size=3), found["costs"]
    names = ("needed_bytes", "read_bytes", "num_reads")
    assert {name: stated[name] for name in names} == {name: getattr(plan.costs, name) for name in names}
    needs = {need["what"]: need["needed_bytes"] for need in found["needs"]}
    assert needs["partition"] == plan.partition_bytes
    assert plan.partition_bytes < needs["peak of host memory"] < plan.partition_bytes + (64 << 20)
    assert found["read_seconds"] is None
    asked = ("plan", llama, "--ds-config", ds_config, "--world-size", 3, "--gpus-per-node", 2, "--read-rate", "1kB/s")
    assert answer(*asked, "--json")[1]["read_seconds"] == 2 * plan.costs.read_bytes / 1000


def test_plan_says_where_more_is_read_than_needed(answer: Answer, llama: Path, tmp_path: Path) -> None:
    asked = ("--world-size", 16, "--gpus-per-node", 4)
    assert "read / needed" not in answer("plan", llama, *asked)[1]
    transposed = tiny_qwen3_vl_moe(tmp_path)
    costs = answer("plan", transposed, *asked, "--json")[1]["costs"]
    assert costs["read_bytes"] > costs["needed_bytes"]
    found = " ".join(answer("plan", transposed, *asked)[1].split())
    assert f"read / needed {costs['read_bytes'] / costs['needed_bytes']:.2f}: " in found


@pytest.mark.parametrize(
    ("limit", "code", "says"),
    [("1TiB", 0, "Fits; with these settings it fits from 1 rank."), ("1MiB", 1, "Does not fit")],
)
def test_plan_ends_with_a_verdict(
    limit: str, code: int, says: str, answer: Answer, llama: Path, ds_config: Path
) -> None:
    asked = ("plan", llama, "--ds-config", ds_config, "--world-size", 64, "--gpus-per-node", 4, "--accelerator", "cuda")
    found = answer(*asked, "--host-memory", limit, "--device-memory", limit)
    assert found[0] == code
    assert says in found[1] and "64 ranks on 16 nodes of 4" in found[1]
    read_by_stock = size(sum(path.stat().st_size for path in llama.glob("*.safetensors")))
    (row,) = (line for line in found[1].splitlines() if "read in" in line)
    assert read_by_stock in row


def test_plan_says_first_what_it_plans_for(answer: Answer, llama: Path, ds_config: Path) -> None:
    asked = ("plan", llama, "--ds-config", ds_config, "--world-size", 12)
    code, text = answer(*asked)
    assert code == 0 and "No verdict: name --host-memory." in text, "DS_ACCELERATOR is cpu"
    head = text.splitlines()[1:5]
    assert "full training under ZeRO-3, on CPUs: all memory is host memory" in head[0] and "DS_ACCELERATOR" in head[0]
    assert "12 ranks on 2 nodes of 8" in head[3]
    text = answer(*asked, "--accelerator", "cuda", "--device-memory", "80GiB")[1]
    assert "full training under ZeRO-3, on GPUs (cuda)" in text.splitlines()[1]
    assert "Fits what is known (--host-memory is not named); with these settings it fits from" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host-memory", "lots"], "--host-memory: expected a size"),
        (["--accelerator", "cuda", "--device-memory", "80"], "--device-memory: .* such as 80GiB, .*, got '80'"),
        (["--read-rate", "5"], "--read-rate: expected a size with its unit"),
        (["--revision", "main"], "--revision main: .* is a local folder, which has no revisions"),
        (["--read-rate", "9" * 400 + "TB"], "--read-rate: expected a size"),
        (["--accelerator", "cpuu"], "accelerator 'cpuu' .*: this torch knows no such device"),
    ],
)
def test_plan_refuses(options: list[str], message: str, answer: Answer, llama: Path, ds_config: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        answer("plan", llama, "--ds-config", ds_config, "--world-size", 2, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fsdp", 2, "--ds-config", "ds.json"], "or --fsdp for FSDP2"),
        (["--fsdp", 2, "--tp", 2, "--world-size", 2], "--world-size 2: the mesh has 4 ranks"),
        *((["--ds-config", "ds.json", "--world-size", 2, name, 2], "go with --fsdp") for name in OF_MESHES),
        (["--fsdp", 2, "--tp", 2, "--four-bit", "--lora-rank", 4], "is sharded by FSDP2 alone; drop --tp"),
        (["--fsdp", 2, "--offload", "optimizer"], "--offload: FSDP2 offloads all or none"),
        (["--world-size", 2, "--four-bit"], "name --lora-rank"),
        (["--world-size", 2, "--offload", "disk"], "--offload: expected none, optimizer or all"),
        (["--world-size", 2, "--trainable", "lots"], "--trainable: expected a share"),
        (["--world-size", 2, "--compare"], "--compare: name --host-memory"),
        (["--world-size", 2, "--gradient-checkpointing"], "changes activations; name --tokens"),
        (["--fsdp", 2, "--accelerator", "cpu"], "--accelerator: FSDP2 is planned for GPUs"),
        # DS_ACCELERATOR is cpu here, as docs/quickstart.md has it.
        (["--ds-config", "ds.json", "--world-size", 2, "--device-memory", "80GiB"], "on CPUs all memory is host"),
    ],
)
def test_plan_refuses_options_of_the_other_sharding(
    options: list[Any], message: str, answer: Answer, llama: Path, ds_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ds_config.parent)
    with pytest.raises(BadParameter, match=message):
        answer("plan", llama, *options)


def test_plan_of_a_mesh_takes_a_world_size_that_fits_and_dequantizes(answer: Answer, llama: Path) -> None:
    asked = ("plan", llama, "--fsdp", 2, "--world-size", 2)
    assert answer(*asked)[0] == 0
    with pytest.raises(UnsupportedError, match="is not quantized"):
        answer(*asked, "--dequantize")


def test_plan_needs_no_files_of_weights(answer: Answer, llama: Path, ds_config: Path, tmp_path: Path) -> None:
    """A model that is planned by its configuration has the sizes of its files."""
    shutil.copy(llama / "config.json", tmp_path)
    plans = [answer("plan", name, "--world-size", 2, "--json")[1] for name in (llama, tmp_path)]
    assert plans[1]["name"].endswith("(config.json alone: sizes as a save would write them)")
    assert plans[0]["costs"]["needed_bytes"] == plans[1]["costs"]["needed_bytes"] > 0


def test_models_of_diffusers_are_inspected_and_planned(answer: Answer, tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8)
    model.save_pretrained(tmp_path / "vae")
    (tmp_path / "config").mkdir()
    shutil.copy(tmp_path / "vae" / "config.json", tmp_path / "config")
    held = answer("inspect", tmp_path, "--subfolder", "vae", "--json")[1]
    assert (held["architectures"], held["num_elements"]) == (["AutoencoderKL"], model.num_parameters())
    assert [way["kind"] for way in held["conversions"]] == ["unchanged"]
    names = (tmp_path / "vae", tmp_path / "config")
    plans = [answer("plan", name, "--world-size", 2, "--lora-rank", 4, "--json")[1] for name in names]
    assert plans[0]["costs"]["needed_bytes"] == plans[1]["costs"]["needed_bytes"] > 0
    assert answer("plan", names[0], "--fsdp", 2, "--json")[1]["costs"]["needed_bytes"] > 0
    with pytest.raises(UnsupportedError, match="diffusers is sharded by FSDP2 alone"):
        answer("plan", names[0], "--fsdp", 2, "--tp", 2)


@pytest.mark.parametrize(
    ("section", "error", "message"),
    [
        ({"stage": 3, "offload_parm": {"device": "cpu"}}, ConfigError, "did you mean offload_param"),
        ({"stage": 2}, UnsupportedError, r"zero_optimization\.stage 2: needs are estimated for stage 3"),
        ({"stage": 3, "mics_shard_size": "auto"}, ConfigError, "mics_shard_size: cannot be resolved"),
    ],
)
def test_plan_refuses_a_ds_config(
    section: dict[str, Any], error: type[Exception], message: str, answer: Answer, llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": section}))
    with pytest.raises(error, match=message):
        answer("plan", llama, "--ds-config", tmp_path / "ds.json", "--world-size", 2)


def test_plan_says_what_deepspeed_ignores_and_what_no_file_has(
    answer: Answer, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = {"zero_optimization": {"stage": 3}, "train_micro_batchsize_per_gpu": 1}
    (tmp_path / "typo.json").write_text(json.dumps(content))
    asked = ("plan", llama, "--ds-config", tmp_path / "typo.json", "--world-size", 2)
    assert "in no file" not in answer(*asked)[1]
    assert "did you mean train_micro_batch_size_per_gpu?" in caplog.text
    assert "Is the model's class right" in answer(*asked, "--auto-class", "BertModel")[1]


def test_a_comparison_without_bitsandbytes_has_the_other_rows(
    answer: Answer, llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lowmem_load.cli.plan.find_spec", lambda name: None)
    limits = ("--world-size", 2, "--accelerator", "cuda", "--host-memory", "1TiB", "--device-memory", "24MiB")
    text = answer("plan", llama, *limits, "--compare")[1]
    assert "LoRA r16" in text and "QLoRA r16" not in text
    with pytest.raises(UnsupportedError, match="needs bitsandbytes"):
        answer("plan", llama, *limits, "--four-bit", "--lora-rank", 8)


COMPARED = [
    (["--world-size", 2, "--accelerator", "cuda"], ["full"] * 3 + ["LoRA r16"] * 2 + ["QLoRA r16"] * 2),
    (["--fsdp", 2], ["full"] * 2 + ["LoRA r16"] * 2 + ["QLoRA r16"] * 2),
    (["--fsdp", 2, "--tp", 2], ["full"] * 2 + ["LoRA r16"] * 2),
]


@pytest.mark.parametrize(("sharding", "ways"), COMPARED)
def test_plan_compares_ways_to_train(sharding: list[Any], ways: list[str], answer: Answer, llama: Path) -> None:
    if "QLoRA r16" in ways:
        pytest.importorskip("bitsandbytes")
    limits = ("--host-memory", "1TiB", "--device-memory", "24MiB")
    code, rows = answer("plan", llama, *sharding, *limits, "--compare", "--json")
    assert [row["training"] for row in rows] == ways
    assert code == (0 if any(row["fits"] for row in rows) else 1)
    needed = [{need["what"]: need["needed_bytes"] for need in row["needs"]} for row in rows]
    training = [needs["device memory of a GPU in training"] for needs in needed]
    offloaded = ways.count("full") - 1
    assert training[0] > training[offloaded] and training[0] > training[offloaded + 1] > training[offloaded + 2]
    text = answer("plan", llama, *sharding, *limits, "--compare")[1]
    assert text == answer("plan", llama, *sharding, *limits, "--compare")[1]
    assert "fits from" in text and "LoRA r16" in text


def test_plan_counts_adapters_and_activations(answer: Answer, llama: Path) -> None:
    asked = ("plan", llama, "--world-size", 2, "--accelerator", "cuda")

    def device_training(*options: Any) -> int:
        (nbytes,) = (
            need["needed_bytes"]
            for need in answer(*asked, *options, "--json")[1]["needs"]
            if need["what"] == "device memory of a GPU in training"
        )
        return int(nbytes)

    adapters = [device_training("--lora-rank", rank) for rank in (1, 2, 3)]
    config = LlamaConfig.from_pretrained(llama)
    linears = [module for module in LlamaForCausalLM(config).model.modules() if isinstance(module, torch.nn.Linear)]
    elements = sum(linear.in_features + linear.out_features for linear in linears)
    assert adapters[2] - adapters[1] == adapters[1] - adapters[0] == elements * (2 + 4 + 12) // 2
    with_tokens = [
        device_training("--lora-rank", 1, "--tokens", 8, *more) for more in ([], ["--gradient-checkpointing"])
    ]
    assert with_tokens[0] > with_tokens[1] > adapters[0]
    assert device_training("--offload", "all") < device_training("--trainable", "50%") < device_training()


def test_an_unexpected_error_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr("lowmem_load.cli.start.app", fail)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 5 and "ZeroDivisionError: by nothing" in capsys.readouterr().err


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


def test_figures_are_not_wrapped_in_narrow_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "34")
    row = ("a.long.name.of.a.tensor", "52.3 KiB", "of two words")
    common.answer(
        False,
        None,
        lambda: [table("Title", ("name", "held", "about"), [row], right=("held",)), facts("", {"name": "it is so"})],
    )
    shown = capsys.readouterr().out
    assert "52.3 KiB" in shown and "it is so" in shown and max(map(len, shown.splitlines())) <= 34
    assert "a.long.name.of.a.tensor" in "".join(line[:13].strip() for line in shown.splitlines())


def test_names_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    common.answer(
        False, None, lambda: [table("t\x1b[2J", ("name",), [("a\x1b[31mb",)]), facts("", {"x\x07": "y\u202e"})]
    )
    shown = capsys.readouterr().out
    assert "t\\x1b[2J" in shown and "a\\x1b[31mb" in shown and "x\\x07" in shown and "y\\u202e" in shown


def test_inspect_shows_architecture_and_conversions(answer: Answer, tmp_path: Path) -> None:
    code, found = answer("inspect", tiny_mixtral(tmp_path), "--json")
    assert (code, found["architectures"], found["not_described"]) == (0, ["MixtralForCausalLM"], None)
    assert sum(nbytes for _, _, nbytes in found["tensors"].values()) == found["by_dtype"]["bfloat16"][1]
    text = answer("inspect", tiny_mixtral(tmp_path))[1]
    assert "MixtralForCausalLM (mixtral)" in text and "made of 8 tensors" in text
    assert "model.embed_tokens.weight = lm_head.weight" in answer("inspect", tiny_qwen2_tied(tmp_path))[1]


def test_inspect_shows_the_tensors_of_an_unknown_model(answer: Answer, llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "architectures": ["Own"]}))
    code, found = answer("inspect", folder, "--json")
    assert (code, found["conversions"]) == (0, [])
    assert "own" in found["not_described"] and found["tensors"]


def test_inspect_names_the_base_of_an_adapter(answer: Answer, tmp_path: Path) -> None:
    save_file({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 3)}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    code, found = answer("inspect", tmp_path, "--json")
    assert (code, found["base_of_adapter"], len(found["tensors"])) == (0, "org/base", 1)
    assert "it is an adapter" in found["not_described"]
    assert "adapter of" in answer("inspect", tmp_path)[1]


def test_verdicts_are_coloured_on_terminals_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown() -> str:
        common.answer(False, None, lambda: [table("", ("verdict", "empty"), [("fits", ""), ("does not fit", "")])])
        return capsys.readouterr().out

    assert "\x1b[" not in shown() and "empty" not in shown()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[32mfits" in shown() and "\x1b[31mdoes not fit" in shown()


def test_errors_have_their_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = (
        ConfigError(""),
        CheckpointError(""),
        UnsupportedError(""),
        IncompatibleVersionError(""),
        RankError("", {}),
    )
    assert list(map(common.exit_code, errors)) == [2, 3, 4, 4, 5]
    monkeypatch.setattr(sys, "argv", ["lowmem-load", "inspect", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (common.CHECKPOINT, "")
    assert told.err.startswith(f"lowmem-load: {tmp_path}") and "holds no weights" in told.err
    monkeypatch.setattr(sys, "argv", ["lowmem-load", "inspect", f"{tmp_path}/\x1b[2J"])
    with pytest.raises(SystemExit):
        main()
    assert "\\x1b[2J" in capsys.readouterr().err  # names of files are untrusted
