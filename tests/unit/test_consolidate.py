"""consolidate: what DeepSpeed's own script makes of a checkpoint, or an error that says what is wrong with it."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from lowmem_load import consolidate
from lowmem_load.cli.start import app
from lowmem_load.errors import CheckpointError, ConfigError, TruncatedFileError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.models.saver import SavedFile
from lowmem_load.planning.expression import Source, permute
from lowmem_load.planning.regions import NOTHING
from lowmem_load.resume.consolidate import ShareOfTensor, _read_piece
from lowmem_load.training_checkpoints.saved_state import in_bands
from lowmem_load.weights_out.weight_files import cut, lay_out
from tests import builders
from tests.zero_checkpoint import save_zero3


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def saved_model(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    """Save a model as ZeRO-3 checkpoint: its norms are frozen, all else is trained."""
    names = {name: p.detach() for name, p in model.named_parameters()}
    frozen = {name: value.bfloat16() for name, value in names.items() if "norm" in name}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(frozen.get(name, p))
    trained = {name: value for name, value in names.items() if name not in frozen}
    buffers = {name: b for name, b in model.named_buffers() if name in model.state_dict()}
    return save_zero3(folder, trained, frozen=frozen, buffers=buffers, **options)


@pytest.fixture
def llama(checkpoints: Path) -> PreTrainedModel:
    path = builders.tiny_llama(checkpoints, torch.float32, **builders.ODD_SIZES)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_folder_is_what_save_pretrained_writes(
    llama: PreTrainedModel, tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("lowmem_load.resume.consolidate"), "CHUNK_BYTES", 1000)
    saved_model(llama, tmp_path / "saved", world_size=world_size, sub_group_size=700)
    llama.config.save_pretrained(tmp_path / "saved")
    of_tokenizers = {"tokenizer.json", "sentencepiece.bpe.model", "tekken.json"}
    for name in of_tokenizers:
        (tmp_path / "saved" / name).write_text("{}")
    report = consolidate(tmp_path / "saved", tmp_path / "made", max_shard_size="30KB")
    llama.save_pretrained(tmp_path / "expected", max_shard_size="30KB")
    expected, made = tmp_path / "expected", tmp_path / "made"
    assert {path.name for path in made.iterdir()} == {path.name for path in expected.iterdir()} | of_tokenizers
    for path in expected.glob("*.safetensors"):
        assert path.read_bytes() == (made / path.name).read_bytes()
    if world_size == 1:
        asked = ["consolidate", str(tmp_path / "saved"), str(tmp_path / "by-command"), "--dtype", "float32"]
        app(asked, standalone_mode=False)
        with pytest.raises(ConfigError, match="by-command: is not empty; name another folder, or pass --overwrite"):
            app(asked, standalone_mode=False)
        app([*asked, "--overwrite"], standalone_mode=False)
        assert tensors_in(tmp_path / "by-command").keys() == tensors_in(made).keys()
    index = "model.safetensors.index.json"
    assert json.loads((made / index).read_text()) == json.loads((expected / index).read_text())
    assert report.num_masters == len(llama.state_dict()) - 5
    assert report.written_bytes == sum(p.numel() * 4 for p in llama.parameters())
    AutoModelForCausalLM.from_pretrained(made)


def test_without_a_configuration_names_stay(tmp_path: Path) -> None:
    trained = {"a.weight": torch.randn(5, 3), "b": torch.randn(7)}
    buffers = {"steps": torch.tensor(3), "mean": torch.randn(2).bfloat16()}
    shared = {"head.weight": "a.weight"}
    save_zero3(tmp_path / "saved", trained, world_size=2, buffers=buffers, shared=shared)
    consolidate(tmp_path / "saved", tmp_path / "made")
    made = tensors_in(tmp_path / "made")
    assert made.keys() == {"a.weight", "b", "steps", "mean", "head.weight"}
    assert torch.equal(made["head.weight"], trained["a.weight"]) and torch.equal(made["b"], trained["b"])
    assert made["steps"].dtype == torch.int64 and made["mean"].dtype == torch.float32
    assert {path.name for path in (tmp_path / "made").iterdir()} == {"model.safetensors"}


def broken(how: str, place: Path) -> None:
    model = place / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    optim = place / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if how == "missing":
        optim.unlink()
    elif how == "truncated":
        optim.write_bytes(optim.read_bytes()[:-300])
    elif how == "another model":
        state = torch.load(model, weights_only=False)
        state["param_shapes"][0]["b"] = torch.Size((9,))
        torch.save(state, model)
    elif how == "another save":
        for file in (model, optim):
            file.rename(file.with_name(file.name.replace("rank_1_", "rank_2_")))
            file.write_bytes(file.with_name(file.name.replace("rank_1_", "rank_2_")).read_bytes())
    elif how == "both precisions":
        optim.with_name(optim.name.removeprefix("bf16_")).write_bytes(optim.read_bytes())
    elif how.endswith(".pt"):
        (place / how).touch()
    elif how == "no latest":
        (place.parent / "latest").unlink()
    else:
        (place.parent / "latest").write_text(how)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("missing", CheckpointError, "saved by 2 ranks, but there are 2 files of model states and 1 of optimizer"),
        ("truncated", TruncatedFileError, "rank_1_mp_rank_00_optim_states.pt: ends at byte .* without a zip"),
        ("another model", CheckpointError, "rank_1_.* has other parameters than zero_pp_rank_0"),
        ("another save", CheckpointError, "was saved by 2 ranks, but there are 3 files"),
        ("both precisions", CheckpointError, "are both of rank 1: two jobs"),
        ("layer_00-model_states.pt", UnsupportedError, "layer_00-model_states.pt: is of tensor, pipeline"),
        ("global_step9", CheckpointError, "'global_step9', which 'latest' names; there are: global_step3"),
        ("no latest", CheckpointError, "no file 'latest'"),
        ("../saved/global_step3", CheckpointError, "no checkpoint '../saved/global_step3'"),
        ("mp_rank_00_model_states.pt", UnsupportedError, "s.pt: was not saved under ZeRO-3.*zero_to_fp32.py"),
    ],
)
def test_a_broken_checkpoint_is_named(how: str, error: type[Exception], text: str, tmp_path: Path) -> None:
    place = save_zero3(tmp_path / "saved", {"a": torch.randn(9, 2), "b": torch.randn(5)}, world_size=2)
    broken(how, place)
    with pytest.raises(error, match=text):
        consolidate(tmp_path / "saved", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_checkpoint_of_another_model_is_refused(llama: PreTrainedModel, tmp_path: Path) -> None:
    saved_model(llama, tmp_path / "saved", world_size=2)
    llama.config.vocab_size += 1
    llama.config.num_hidden_layers += 1
    llama.config.save_pretrained(tmp_path / "config")
    with pytest.raises(CheckpointError, match=r"missing: model.layers.2.* shape: model.embed_tokens.weight is \(101"):
        consolidate(tmp_path / "saved", tmp_path / "made", config=tmp_path / "config")


def test_what_was_trained_apart_is_not_tied(llama: PreTrainedModel, tmp_path: Path) -> None:
    saved_model(llama, tmp_path / "saved", world_size=2)
    llama.config.tie_word_embeddings = True
    llama.config.save_pretrained(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight and lm_head.weight are two .* tie_word_embeddings"):
        consolidate(tmp_path / "saved", tmp_path / "made")
    (tmp_path / "saved" / "tokenizer").mkdir()  # is none of the files that are copied
    consolidate(tmp_path / "saved", tmp_path / "made", config=False)
    assert torch.equal(tensors_in(tmp_path / "made")["lm_head.weight"], llama.lm_head.weight)


def test_arguments_are_checked(tmp_path: Path) -> None:
    save_zero3(tmp_path, {"a": torch.zeros(3)}, world_size=1)
    with pytest.raises(ConfigError, match="int8"):
        consolidate(tmp_path, tmp_path / "made", dtype=torch.int8)
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        consolidate(tmp_path, tmp_path / "made", config=tmp_path / "nowhere")
    hostile = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10**12}
    (tmp_path / "config.json").write_text(json.dumps(hostile))
    with pytest.raises(CheckpointError, match=r"config\.json: num_hidden_layers: expected 0 to"):
        consolidate(tmp_path, tmp_path / "made")


def test_no_file_from_outside_of_the_checkpoint_is_taken(llama: PreTrainedModel, tmp_path: Path) -> None:
    checkpoint = saved_model(llama, tmp_path / "run" / "checkpoint-5", world_size=2).parent
    llama.config.save_pretrained(tmp_path / "run")  # whoever has written it
    made = consolidate(checkpoint, tmp_path / "made")
    assert not (tmp_path / "made" / "config.json").exists()
    assert made.left_out == []
    llama.config.save_pretrained(checkpoint)
    (tmp_path / "secret").write_text("private")
    (checkpoint / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: is a link to a file outside of its folder"):
        consolidate(checkpoint, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    (checkpoint / "tokenizer.json").rename(checkpoint / "generation_config.json")
    with pytest.raises(CheckpointError, match=r"generation_config.json: is a link to a file outside of its folder"):
        consolidate(checkpoint, tmp_path / "other")
    (checkpoint / "generation_config.json").unlink()
    (checkpoint / "tokenizer-7.json").write_text("own")
    (checkpoint / "tokenizer.json").symlink_to("tokenizer-7.json")
    consolidate(checkpoint, tmp_path / "other")
    assert (tmp_path / "other" / "tokenizer.json").read_text() == "own"
    (tmp_path / "private").mkdir()
    (checkpoint / "config.json").rename(tmp_path / "private" / "config.json")
    (checkpoint / "global_step3" / "huggingface").symlink_to(tmp_path / "private")
    with pytest.raises(CheckpointError, match=r"config.json: is a link to a file outside of its folder"):
        consolidate(checkpoint, tmp_path / "third")


def test_links_in_the_cache_of_the_hub_are_followed(llama: PreTrainedModel, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    checkpoint = saved_model(llama, snapshot / "checkpoint-5", world_size=2).parent
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    llama.config.save_pretrained(blobs)
    (checkpoint / "config.json").symlink_to("../../../blobs/config.json")
    consolidate(checkpoint, tmp_path / "made")
    assert (tmp_path / "made" / "config.json").exists()
    assert not (tmp_path / "made" / "config.json").is_symlink()


def test_pods_export_a_world_size_without_ranks(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved_model(llama, tmp_path / "saved", world_size=2).parent
    for key, value in {"WORLD_SIZE": "8", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    llama.config.save_pretrained(checkpoint)
    result = CliRunner().invoke(app, ["consolidate", str(checkpoint), str(tmp_path / "made"), "--config", "none"])
    assert result.exit_code == 0, result.output
    assert "rank 0 of 1" in result.output and "made of a checkpoint of DeepSpeed's ZeRO: 4 files" in result.output
    assert "No config.json was written" in result.output
    assert not (tmp_path / "made" / "config.json").exists()


def test_a_piece_of_a_transposed_tensor_reads_it_once(tmp_path: Path) -> None:
    """A piece begins and ends within a row, so its elements are copied in three parts, each of which spans all."""
    values = torch.arange(40 * 30.0).view(40, 30)
    (tmp_path / "data").write_bytes(values.numpy().tobytes())
    leaf = Source(str(tmp_path / "data"), "p", 0, (40, 30), torch.float32)
    layout = lay_out(SavedFile("f", {"t": permute(leaf, (1, 0))}, {}))
    with Executor() as executor:
        share = ShareOfTensor("p", in_bands(leaf), NOTHING, executor, torch.empty(700, dtype=torch.uint8))
        pieces = [_read_piece(piece, {"p": share}) for piece in cut(layout, 333 * 4)]
        assert torch.equal(torch.cat(pieces), values.t().flatten())
        assert executor.stats.read_bytes <= len(pieces) * values.nbytes
