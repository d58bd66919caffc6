"""The arguments of ModelEngine: dataclasses, dicts and YAML files; every mistake is one clear error."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lowmem_load import ConfigError, DistConfig, ModelArguments, ModelEngine, UnsupportedError
from lowmem_load.pipelines.arguments import read_arguments

DS = {"zero_optimization": {"stage": 3}}
DIST = {"name": "deepspeed", "config_file": DS}

# Every top-level key of the examples of LLaMA-Factory v1 that is not the engine's, and some more of its dataclasses.
LLAMA_FACTORY_KEYS = (
    *("template", "init_config", "peft_config", "kernel_config", "train_dataset", "eval_dataset", "output_dir"),
    *("micro_batch_size", "global_batch_size", "cutoff_len", "learning_rate", "num_train_epochs", "max_steps"),
    *("max_grad_norm", "batching_strategy", "batching_workers", "optim_config", "lr_scheduler_config", "seed"),
    *("sample_backend", "max_new_tokens", "save_steps", "save_total_limit", "resume_from_checkpoint", "logging_steps"),
    *("stage", "model_type", "dp_size", "cp_size", "report_to", "do_train", "tf32", "gradient_accumulation_steps"),
)


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@pytest.fixture
def ds_file(tmp_path: Path) -> Path:
    path = tmp_path / "yaml" / "ds_z3.json"
    write(path, json.dumps(DS))
    return path


def test_defaults() -> None:
    args, dist, extra = read_arguments({"model": "m"}, {"config_file": DS})
    assert args == ModelArguments("m")
    assert (args.trust_remote_code, args.verify, args.bf16, args.fp16, args.freeze) == (False, False, None, None, ())
    assert args.gradient_checkpointing is None
    assert dist == DistConfig(DS)
    assert (dist.name, dist.timeout, extra) == ("deepspeed", None, {})


def test_the_same_from_dataclasses_dicts_and_yaml(tmp_path: Path, ds_file: Path) -> None:
    settings = {"model": "m", "auto_class": "AutoModel", "bf16": True, "freeze": ["a.*", "b"], "model_kwargs": {"x": 1}}
    section = {"name": "deepspeed", "config_file": str(ds_file), "timeout": 60}
    indented = json.dumps(settings), json.dumps(section)  # JSON is YAML
    model_file = write(tmp_path / "model.yaml", indented[0])
    dist_file = write(tmp_path / "dist.yml", indented[1])
    flat = write(tmp_path / "flat.yaml", json.dumps({**settings, "dist_config": section}))
    nested = write(tmp_path / "nested.yaml", json.dumps({"model_args": settings, "dist_config": section}))
    expected = (ModelArguments(**settings), DistConfig(**section), {})
    cases: list[tuple[Any, Any]] = [
        expected[:2],
        (settings, section),
        (expected[0], section),
        (settings, expected[1]),
        (model_file, dist_file),
        (Path(model_file), Path(dist_file)),
        (settings, flat),
        (flat, None),
        (nested, None),
        ({**settings, "dist_config": section}, None),
    ]
    for model_args, dist_config in cases:
        assert read_arguments(model_args, dist_config) == expected
    assert expected[0].freeze == ("a.*", "b")


def test_a_yaml_of_llama_factory(tmp_path: Path, ds_file: Path) -> None:
    """The shape of examples/v1/train_full/train_full_deepspeed.yaml."""
    path = write(
        tmp_path / "yaml" / "train.yaml",
        """
model: Qwen/Qwen3-0.6B
model_class: llm
flash_attn: sdpa
trust_remote_code: null
enable_activation_checkpointing: false
quant_config: null
kernel_config:
    name: auto
dist_config:
    name: deepspeed
    config_file: ds_z3.json
train_dataset: data/v1_sft_demo.yaml
micro_batch_size: 1
learning_rate: 1.0e-4
""",
    )
    args, dist, extra = read_arguments(path)
    assert args == ModelArguments("Qwen/Qwen3-0.6B", attn_implementation="sdpa", gradient_checkpointing=False)
    assert dist == DistConfig(str(ds_file))
    assert extra == {
        "kernel_config": {"name": "auto"},
        "train_dataset": "data/v1_sft_demo.yaml",
        "micro_batch_size": 1,
        "learning_rate": 1e-4,
    }


def test_the_keys_of_llama_factory_are_no_near_misses() -> None:
    _, _, extra = read_arguments({"model": "m", "dist_config": DIST, **dict.fromkeys(LLAMA_FACTORY_KEYS, 1)})
    assert extra == dict.fromkeys(LLAMA_FACTORY_KEYS, 1)


def test_a_yaml_in_sections(tmp_path: Path, ds_file: Path) -> None:
    text = f"model_args: {{model: m}}\ndist_config: {{config_file: '{ds_file}'}}\ntraining: {{bf16: true}}\n"
    args, dist, extra = read_arguments(write(tmp_path / "all.yaml", text))
    assert (args, dist, extra) == (ModelArguments("m"), DistConfig(str(ds_file)), {"training": {"bf16": True}})


def test_a_foreign_dataclass() -> None:
    class Attention(str, enum.Enum):
        SDPA = "sdpa"

    @dataclasses.dataclass
    class Foreign:
        model: str = "m"
        template: str = "qwen3"
        flash_attn: Attention = Attention.SDPA
        model_class: str = "other"
        quant_config: None = None

    args, _, extra = read_arguments(Foreign(), DIST)
    assert args == ModelArguments("m", auto_class="AutoModel", attn_implementation="sdpa")
    assert extra == {"template": "qwen3"}


def test_an_explicit_dist_config_takes_precedence() -> None:
    _, dist, _ = read_arguments({"model": "m", "dist_config": {"config_file": "/absent.json"}}, DIST)
    assert dist == DistConfig(DS)


def test_config_file_is_looked_for_beside_the_yaml_first(
    tmp_path: Path, ds_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "yaml" / "a.yaml", "{model: m, dist_config: {config_file: ds_z3.json}}")
    write(tmp_path / "ds_z3.json", "{}")
    monkeypatch.chdir(tmp_path)
    assert read_arguments(path)[1].config_file == str(ds_file)
    ds_file.unlink()
    assert read_arguments(path)[1].config_file == str(tmp_path / "ds_z3.json")
    assert read_arguments({"model": "m"}, {"config_file": "ds_z3.json"})[1].config_file == str(tmp_path / "ds_z3.json")
    (tmp_path / "ds_z3.json").unlink()
    message = f"config_file ds_z3.json: no such file in {tmp_path / 'yaml'} or {tmp_path}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_arguments(path)
    inline = write(
        tmp_path / "yaml" / "b.yaml", "{model: m, dist_config: {config_file: {zero_optimization: {stage: 3}}}}"
    )
    assert read_arguments(inline)[1].config_file == DS
    text = json.dumps(DS)
    assert read_arguments({"model": "m"}, {"config_file": text})[1].config_file == text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "model_args: model is missing"),
        ({"model": None}, "model is missing"),
        ({"model": 3}, "ModelArguments.model: expected a folder or a Hub id, got 3"),
        ({"model": ""}, "got an empty string"),
        ({"model": "m", "atn": 1, "fre": 2}, "unknown key(s) atn, fre; known are model, auto_class, "),
        ({"model": "m", "auto_class": 3}, "ModelArguments.auto_class: expected a class, its name, or None, got 3"),
        ({"model": "m", "trust_remote_code": "yes"}, "trust_remote_code: expected true or false, got 'yes'"),
        ({"model": "m", "revision": 1.5}, "ModelArguments.revision: expected a string, got 1.5"),
        ({"model": "m", "bf16": 1}, "ModelArguments.bf16: expected true or false, or nothing, got 1"),
        ({"model": "m", "fp16": "auto"}, "ModelArguments.fp16: expected true or false"),
        ({"model": "m", "gradient_checkpointing": "no"}, "ModelArguments.gradient_checkpointing: expected"),
        ({"model": "m", "freeze": [1]}, "ModelArguments.freeze: expected a list of glob patterns, got [1]"),
        ({"model": "m", "freeze": {"a": 1}}, "ModelArguments.freeze: expected a list of glob patterns"),
        ({"model": "m", "model_kwargs": [1]}, "ModelArguments.model_kwargs: expected a mapping of keywords, got [1]"),
        ({"model": "m", "model_kwargs": {"torch_dtype": "auto"}}, "torch_dtype (the precision decides it"),
        ({"model": "m", "model_kwargs": {"revision": "x"}}, "remove revision (write it beside model_kwargs)"),
        ({"model": "m", "flash_attn": "sdpa", "attn_implementation": "eager"}, "two names of one thing"),
        ({"model_args": {"model": "m", "nope": 1}}, "model_args: model_args: unknown key(s) nope"),
        ({"model_args": ["m"]}, "model_args: model_args: expected a mapping, got ['m']"),
        ({"model_args": {"model": "m"}, "bf16": True}, "bf16 beside model_args; write it below model_args"),
        ({"model_args": {"model": "m"}, "dist_confg": {}}, "unknown key dist_confg; did you mean dist_config?"),
        ({"model": "m", "atn_implementation": "x", "dist_config": DIST}, "did you mean attn_implementation?"),
        ({"model_arg": {"model": "m"}, "dist_config": DIST}, "unknown key model_arg; did you mean model_args?"),
        (3, "model_args: cannot use a int; pass a dataclass, a dict, or the path of a YAML file"),
        ("org/model", "org/model: no such YAML file; for the name of a model write {\"model\": 'org/model'}"),
    ],
)
def test_bad_model_args(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_arguments(values, DIST)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (None, "no dist_config: pass"),
        ({}, "dist_config: config_file is missing"),
        ({"name": "fsdp2", "dcp_path": None}, "DistConfig.name: expected 'deepspeed', got 'fsdp2'"),
        ({"name": 3, "config_file": DS}, "DistConfig.name: expected 'deepspeed', got 3"),
        ({"config_file": DS, "tiemout": 1}, "unknown key(s) tiemout; known are config_file, name, timeout"),
        ({"config_file": [DS]}, "DistConfig.config_file: expected a ds_config, or the path of its JSON file"),
        ({"config_file": "/no/ds.json"}, "config_file /no/ds.json: no such file in /no"),
        ({"config_file": DS, "timeout": "60"}, "DistConfig.timeout: expected a number of seconds, got '60'"),
        ({"config_file": DS, "timeout": True}, "DistConfig.timeout: expected a number of seconds, got True"),
        ({"config_file": DS, "timeout": -1}, "DistConfig.timeout: expected a positive number of seconds, got -1"),
        ({"config_file": DS, "timeout": math.inf}, "DistConfig.timeout: expected a positive number"),
        (DS, 'this is a ds_config itself; pass {"config_file": it}'),
        ({"dist_config": "x"}, "dist_config: dist_config: expected a mapping, got 'x'"),
        ("/no/dist.yaml", "/no/dist.yaml: no such YAML file"),
    ],
)
def test_bad_dist_config(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_arguments({"model": "m"}, values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "bad.yaml: not YAML: while parsing"),
        ("model: !!python/object/apply:os.getcwd []", "bad.yaml: not YAML: could not determine a constructor"),
        ("just words", "bad.yaml: expected a mapping, got 'just words'"),
        ("", "bad.yaml: expected a mapping, got None"),
        ("model: m", "no dist_config: pass"),
        ("{model: m, dist_config: null}", "no dist_config: pass"),
        ("{model: m, dist_config: [1]}", "bad.yaml: dist_config: expected a mapping, got [1]"),
        ("{model: m, dist_config: {config_file: ds.json}}", "bad.yaml: dist_config: config_file ds.json: no such file"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_arguments(write(tmp_path / "bad.yaml", text))


def test_a_yaml_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_arguments(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("quant_config", {"name": "bnb"}, "quant_config: not supported here; load_model takes"),
        ("model_class", "cls", "model_class 'cls': expected 'llm' or 'other'"),
    ],
)
def test_what_cannot_be_streamed(key: str, value: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        read_arguments({"model": "m", key: value, "dist_config": DIST})


def test_bad_arguments_make_no_process_group() -> None:
    import torch.distributed as dist

    with pytest.raises(ConfigError):
        ModelEngine({"model": "m"})
    assert not dist.is_initialized()
