"""What a name stands for: which folders have weights that can be loaded, and which configurations make a model."""

import functools
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lowmem_load import plan
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import CheckpointError, ConfigError, UnsupportedError
from lowmem_load.integrations.install import streaming
from lowmem_load.models import diffusion
from lowmem_load.models.model_class import PROCESSOR_FILES, TOKENIZER_FILES, load_processor, model_class, model_config
from lowmem_load.models.model_folder import check_name, commit_of, find_checkpoint
from lowmem_load.models.skeleton import refuse_parted
from tests import builders
from tests.hub import hub
from tests.remote.hub_front import COMMIT


@pytest.mark.parametrize(
    ("name", "subfolder", "text"),
    [
        ("gone", "", "gone: no such folder"),
        ("a/b/c", "", "a/b/c: no such folder"),
        ("model/config.json", "", "is a file; pass the folder that has it"),
        ("model", "gone", "gone: no such subfolder"),
        ("model", "empty", "empty: the folder is empty"),
        ("model", "", None),
    ],
)
def test_a_name_that_is_meant_as_a_folder_never_reaches_the_hub(
    name: str, subfolder: str, text: str | None, tmp_path: Path
) -> None:
    (tmp_path / "model" / "empty").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    check_name("someone/some-model", "")
    full = name if name == "a/b/c" else str(tmp_path / name)
    if text is None:
        check_name(full, subfolder)
        return
    with pytest.raises(CheckpointError, match=text):
        check_name(full, subfolder)


def test_a_format_of_which_every_rank_holds_all_is_refused(checkpoints: Path) -> None:
    with pytest.raises(UnsupportedError, match=r'cannot read gguf_file.*gguf_file="x-q4.gguf"'):
        plan(builders.tiny_llama(checkpoints), Z3, rank=0, world_size=2, gguf_file="x-q4.gguf")


@pytest.mark.parametrize(
    ("tp_size", "style", "refused"), [(2, "colwise", True), (2, "packed_colwise", False), (1, "colwise", False)]
)
def test_a_plan_that_parts_gates_from_what_they_gate_is_refused(tp_size: int, style: str, refused: bool) -> None:
    """As of Inkling 2 in transformers 5.24: its own load keeps them together, and then saves a mixture."""
    config = SimpleNamespace(distributed_config=SimpleNamespace(tp_size=tp_size))
    plan = {"model.layers.*.mlp.experts.gate_up_proj": style, "model.layers.*.q_proj": "colwise"}
    model = SimpleNamespace(config=config, tp_plan=plan)
    if not refused:
        refuse_parted(model)
        return
    with pytest.raises(UnsupportedError, match=r"experts.gate_up_proj.*tp_plan=.*experts.gate_up_proj': 'packed_colw"):
        refuse_parted(model)


Z3 = {"zero_optimization": {"stage": 3}}
FILES_OF_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (FILES_OF_SHARDS, "has model-00001-of-00002.safetensors, .*but lacks model.safetensors.index.json, which says"),
        (("pytorch_model-00001-of-00002.bin",), "but lacks pytorch_model.bin.index.json"),
        (("model.fp16-00001-of-00002.safetensors",), "but lacks model.fp16.safetensors.index.json"),
        (("x-q4.gguf",), "It has config.json, x-q4.gguf"),
        (("optimizer.pt", "rng_state_0.pth"), "state of a training run; name the folder of the model"),
        (("mp_rank_00_model_states.pt",), "state of a training run; .*`lowmem-load consolidate`"),
        (("weights.safetensors",), "no file named model.safetensors.* It has config.json, weights.safetensors"),
        (("model.safetensors",), None),
    ],
)
def test_files_that_transformers_does_not_look_for_are_named(
    files: Sequence[str], text: str | None, checkpoints: Path, tmp_path: Path
) -> None:
    source = Path(builders.tiny_llama(checkpoints))
    shutil.copy(source / "config.json", tmp_path)
    for file in files:
        shutil.copy(source / "model.safetensors", tmp_path / file)
    asked = functools.partial(plan, tmp_path, Z3, rank=0, world_size=2)
    if text is None:
        assert asked().files
        return
    with pytest.raises(CheckpointError, match=text) as raised:
        asked()
    assert str(raised.value).startswith(str(tmp_path))


def test_weights_without_a_configuration_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    shutil.copy(Path(builders.tiny_llama(checkpoints)) / "model.safetensors", tmp_path)
    with pytest.raises(CheckpointError, match=r"has no config.json, which says what model the weights are of"):
        model_config(str(tmp_path), {})
    # transformers would build the default model of the class: of 7 B parameters.
    with streaming({"zero_optimization": {"stage": 3}}), pytest.raises(CheckpointError, match=r"has no config\.json"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    DistributedInterface().destroy()


def test_a_relative_name_is_looked_for_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("checkpoint-500", "out/checkpoint-500", "./out", "out/x/y"):
        for find in (lambda name: model_config(name, {}), find_checkpoint):
            with pytest.raises(CheckpointError, match=f"^{re.escape(name)}: no such folder in {tmp_path}") as raised:
                find(name)
            assert "huggingface.co" not in str(raised.value)


# -- configurations of models ----------------------------------------------------------------------------------------

ODD_CONFIGS: dict[str, Any] = {
    **{f"hidden_size {value!r}": {"hidden_size": value} for value in ("8", None, [], -8, 0, 10**12, 1.5)},
    **{f"vocab_size {value!r}": {"vocab_size": value} for value in ("x", -5, 10**12)},
    **{f"num_attention_heads {value!r}": {"num_attention_heads": value} for value in (0, -2, 3, 10**12)},
    **{f"num_hidden_layers {value!r}": {"num_hidden_layers": value} for value in ("2", -1, 10**12)},
    **{f"architectures {value!r}": {"architectures": value} for value in ("LlamaForCausalLM", 7, [7], [""], {})},
    **{f"dtype {value!r}": {"dtype": value} for value in ("llama", [])},
    **{f"model_type {value!r}": {"model_type": value} for value in (7, [], "nope")},
    **{f"rope {value!r}": {"rope_parameters": value} for value in (7, {"rope_type": "x"}, {"rope_theta": "a"})},
    **{f"text_config {value!r}": {"text_config": value} for value in (7, {})},
    "id2label": {"id2label": 7},
    "hidden_act": {"hidden_act": "nope"},
    "auto_map": {"auto_map": 7},
    "pad_token_id": {"pad_token_id": 10**12},
    "code of its own": {"model_type": "nope", "auto_map": {"AutoConfig": "code.Config"}},
}


@pytest.mark.parametrize("odd", ODD_CONFIGS.values(), ids=ODD_CONFIGS)
def test_a_configuration_of_wrong_values_is_an_error_of_ours(
    odd: dict[str, Any], checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(builders.tiny_llama(checkpoints), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **odd}))
    with pytest.raises((CheckpointError, ConfigError), match=str(folder)) as caught:
        plan(folder, {"zero_optimization": {"stage": 3}}, rank=0, world_size=2)
    if "hidden_act" in odd:  # a fault of ours, or of transformers, is not hidden by the file being blamed
        assert "LlamaForCausalLM cannot be built from its config" in str(caught.value)
        assert isinstance(caught.value.__cause__, KeyError)
        with pytest.raises(KeyError):  # outside of a load it is named as ever
            LlamaForCausalLM(LlamaConfig.from_pretrained(folder))


# -- classes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auto_class", "config", "text"),
    [
        (int, {}, "auto_class int has no from_pretrained; pass a transformers class"),
        ("LlamaForNothing", {}, "auto_class: transformers .* has no model class 'LlamaForNothing'"),
        ("LlamaConfig", {}, "has no model class 'LlamaConfig'"),
        (None, {}, "names no architectures; pass auto_class"),
        (None, {"architectures": "MyModel"}, "architectures: expected a list of class names"),
        (None, {"architectures": ["MyModel"]}, "architectures of the model's config: .* no model class 'MyModel'"),
        (
            None,
            {"architectures": ["MyModel"], "auto_map": {"AutoModelForNothing": "code.MyModel"}},
            "auto_map of the model's config: .* no model class 'AutoModelForNothing'",
        ),
    ],
)
def test_a_class_that_is_not_there(auto_class: Any, config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        model_class(auto_class, SimpleNamespace(**config), trust_remote_code=True)


def test_code_of_a_checkpoint_is_chosen_only_if_trusted() -> None:
    config = SimpleNamespace(
        architectures=["MyModel"], auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.MyModel"}
    )
    assert model_class(None, config, trust_remote_code=True) is AutoModelForCausalLM
    with pytest.raises(ConfigError, match="no model class 'MyModel'"):
        model_class(None, config, trust_remote_code=False)
    assert model_class(LlamaForCausalLM, config, trust_remote_code=False) is LlamaForCausalLM


def test_a_constructor_may_name_a_keyword_like_an_argument_of_ours(checkpoints: Path) -> None:
    taken: list[int] = []

    class Keyed(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig, *, context: int) -> None:
            taken.append(context)
            super().__init__(config)

    zero3 = {"zero_optimization": {"stage": 3}}
    plan(builders.tiny_llama(checkpoints), zero3, rank=0, world_size=2, auto_class=Keyed, context=1)
    assert taken == [1]


def test_a_diffusers_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"_class_name": "UNet2DModel", "_diffusers_version": "0.42.0"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setitem(sys.modules, diffusion.MODULE, None)  # as if one of its own imports failed
    with pytest.raises(ConfigError, match=r"of a model of diffusers, which cannot be imported: .*halted"):
        diffusion.model_class(str(tmp_path), None, {})


# -- the Hub ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(checkpoints: Path, tmp_path: Path) -> Path:
    """A cache of the Hub that holds the configuration of `someone/llama`; tests run offline."""
    repository = tmp_path / "models--someone--llama"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copy(Path(builders.tiny_llama(checkpoints)) / "config.json", snapshot)
    return tmp_path


def test_files_in_the_cache_are_checked_before_transformers_reads_them(cached: Path) -> None:
    hub = {"cache_dir": str(cached)}
    assert model_config("someone/llama", hub).architectures == ["LlamaForCausalLM"]
    expected = f"someone/other: no such folder in {Path.cwd()}; as a model on the Hub: the Hub's cache does not have"
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        model_config("someone/other", hub)
    assert load_processor("someone/llama", hub) is None
    (config,) = cached.rglob("config.json")
    (config.parent / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="its tokenizer cannot be loaded"):
        load_processor("someone/llama", hub)
    config.write_text("[" * 5000)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        model_config("someone/llama", hub)


def test_a_configuration_may_be_given(checkpoints: Path, tmp_path: Path) -> None:
    folder = builders.tiny_llama(checkpoints)
    config = model_config(str(folder), {})
    assert model_config("someone/other", {"config": config}) is config
    file = shutil.copy(Path(folder) / "config.json", tmp_path / "other.json")
    assert model_config(str(folder), {"config": file}).to_dict().keys() == config.to_dict().keys()


def test_a_name_is_asked_for_once(tmp_path: Path) -> None:
    model, cache = tmp_path / "model", {"cache_dir": str(tmp_path / "cache")}
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with hub(model, "org/model") as asked:
        assert commit_of("org/model", cache) == COMMIT
        asked.clear()
        assert commit_of("org/model", {**cache, "revision": "main"}) == COMMIT
        assert asked.count("HEAD config.json") == 1
        assert commit_of("org/model", {**cache, "revision": COMMIT}) == COMMIT
        assert asked.count("HEAD config.json") == 1
        assert {*asked} <= {"HEAD config.json", "HEAD adapter_config.json"}, "older releases ask for adapters each time"
        assert commit_of("org/absent", cache) == ""
    assert commit_of("org/model", cache) == COMMIT, "offline it is what the cache says"
    assert commit_of(str(model), {}) == ""
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    with hub(model, "org/adapter"):
        assert commit_of("org/adapter", cache) == "", "of the base model nothing is known"


# -- what goes with a model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "kind"), [(PROCESSOR_FILES[0], "processor"), (TOKENIZER_FILES[1], "tokenizer")])
def test_a_broken_processor_is_an_error_and_none_is_none(
    file: str, kind: str, checkpoints: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(builders.tiny_llama(checkpoints), folder)
    for known in (*PROCESSOR_FILES, *TOKENIZER_FILES):
        (folder / known).unlink(missing_ok=True)
    assert load_processor(str(folder), {}) is None
    (folder / file).write_text("{")
    with pytest.raises(CheckpointError, match=f"its {kind} cannot be loaded: .*; repair its files, or remove all"):
        load_processor(str(folder), {})
