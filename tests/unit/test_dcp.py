"""dcp.py, rank_files.py, names.py: what real torch has saved is read; what is wrong with it is named."""

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

from lowmem_load import consolidate
from lowmem_load.errors import CheckpointError, ConfigError, TruncatedFileError, UnsupportedError
from lowmem_load.files.executor import Executor
from lowmem_load.files.fill import read_whole
from lowmem_load.files.inert_pickle import Foreign, Storage, Tensor, objects
from lowmem_load.files.torch_zip import TorchObjects, _Entry
from lowmem_load.training_checkpoints.names import NamedWeights, weights_in, without_wrappers
from lowmem_load.training_checkpoints.open_model import open_model, open_state
from lowmem_load.training_checkpoints.rank_files import _dtensor, _of_file, _tiles
from tests.fuzz.targets import CORPUS

TENSORS = {
    "a.weight": torch.arange(35.0).view(7, 5),
    "b.weight": torch.arange(8, dtype=torch.bfloat16).view(4, 2).t(),  # not contiguous
    "c": torch.tensor(3),
    "d": torch.arange(300 * 300).view(300, 300),
    "empty": torch.empty(0, 3),
}


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that one process has saved."""
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    optimizer = {"state": {"a.weight": {"exp_avg": torch.zeros(7, 5)}}, "param_groups": [{"lr": 0.1}]}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": TENSORS, "optimizer": optimizer, "step": 3}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def saved(once: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(once, tmp_path / "saved"))


def values_in(folder: Path) -> dict[str, torch.Tensor]:
    with Executor() as executor:
        tensors = weights_in(str(folder), open_state(str(folder), executor)[1], None).model
        return {name: read_whole(executor, tensor.whole) for name, tensor in tensors.items()}


def test_all_values_are_read(once: Path) -> None:
    values = values_in(once)
    assert values.keys() == TENSORS.keys()
    assert all(torch.equal(values[name], value) for name, value in TENSORS.items())
    with Executor() as executor:
        _, tensors, _ = open_state(str(once), executor)
        assert {keys[0] for keys in tensors} == {"model", "optimizer"}
        assert executor.stats.read_bytes == 0


def changed(folder: Path, change: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def of(metadata: Metadata, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == f"model.{name}")


def without_places(metadata: Metadata) -> None:
    for index in [index for index in metadata.storage_data if index.fqn == "model.d"]:
        del metadata.storage_data[index]


def without_keys(metadata: Metadata) -> None:
    metadata.planner_data["model.d"] = ()


def with_other_shape(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a.weight"].chunks[0].sizes = torch.Size([7, 4])


def with_info(name: str, value: Any) -> Callable[[Path], None]:
    """Return what gives the chunk of a tensor another place."""
    return lambda folder: changed(folder, lambda metadata: setattr(of(metadata, "d"), name, value))


DATA = "__0_0.distcp"
DAMAGES: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "file missing": (lambda at: (at / DATA).unlink(), CheckpointError, f"{DATA}: is missing, with 6 chunks"),
    "metadata missing": (lambda at: (at / ".metadata").unlink(), CheckpointError, "no .metadata: the save did not end"),
    "truncated": (lambda at: cut_short(at / DATA), TruncatedFileError, f"{DATA}: has .* are expected"),
    "metadata truncated": (lambda at: cut_short(at / ".metadata"), CheckpointError, "its pickle is malformed"),
    "another save": (lambda at: shifted(at / DATA), CheckpointError, "another save may have written the file"),
    "other shape": (lambda at: changed(at, with_other_shape), CheckpointError, "where .metadata says torch.float32 of"),
    "no keys": (lambda at: changed(at, without_keys), CheckpointError, "is not metadata of a torch DCP checkpoint"),
    "place missing": (lambda at: changed(at, without_places), CheckpointError, "model.d: no file has the chunk at"),
    "compressed": (with_info("transform_descriptors", ["zstd"]), UnsupportedError, "model.d.* transform_descriptors"),
    "outside": (with_info("relative_path", "../x.distcp"), CheckpointError, "'../x.distcp' as one of its files"),
    "too few bytes": (with_info("length", 10), CheckpointError, "model.d is not in the 10 bytes"),
    "something else": (
        lambda at: (at / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        CheckpointError,
        "is not meta",
    ),
}


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def shifted(path: Path) -> None:
    path.write_bytes(b"x" * 64 + path.read_bytes())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_checkpoint_is_named_and_nothing_written(saved: Path, tmp_path: Path, damage: str) -> None:
    harm, error, text = DAMAGES[damage]
    harm(saved)
    with pytest.raises(error, match=text) as caught:
        consolidate(saved, tmp_path / "made")
    assert type(caught.value) is error
    assert not (tmp_path / "made").exists()


def test_code_in_the_metadata_is_not_run(saved: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "was-run"), "w")

    changed(saved, lambda metadata: setattr(metadata, "planner_data", Evil()))
    with pytest.raises(CheckpointError, match="is not metadata"):
        consolidate(saved, tmp_path / "made")
    assert not (tmp_path / "was-run").exists()


# -- shards in safetensors files ---------------------------------------------------------------------------------------


def shards(folder: Path, info: list[Any]) -> Path:
    """A folder of two files, each with half of a tensor, and this sharding info in the headers."""
    folder.mkdir()
    for number, half in enumerate(TENSORS["d"].split(150)):
        metadata = {"DCP_SHARDING_INFO": json.dumps(info[number])} if info[number] is not None else None
        save_file(
            {"d": half.contiguous()}, folder / f"shard-0000{number + 1}-model-00001-of-00001.safetensors", metadata
        )
    return folder


def test_parts_in_safetensors_files(tmp_path: Path) -> None:
    places = [{"d": {"saved_offsets": [first, 0]}} for first in (0, 150)]
    assert torch.equal(values_in(shards(tmp_path / "right", places))["d"], TENSORS["d"])
    for name, wrong, text in (
        ("none", [places[0], None], "has no DCP_SHARDING_INFO"),
        ("other", [places[0], {}], "does not say where the part of d belongs"),
        ("dims", [places[0], {"d": {"saved_offsets": [1]}}], "does not say where"),
        ("gap", [places[0], {"d": {"saved_offsets": [200, 0]}}], "indices 150 to 200 of dim 0"),
    ):
        with pytest.raises(CheckpointError, match=text):
            values_in(shards(tmp_path / name, wrong))
    later = [{"d": {**place["d"], "global_shape": [300, 300]}} for place in places]
    with pytest.raises(UnsupportedError, match="its header has global_shape, as in pytorch's pull request 189945"):
        values_in(shards(tmp_path / "later", later))
    first = tmp_path / "right" / "shard-00001-model-00001-of-00001.safetensors"
    shutil.copyfile(first, tmp_path / "right" / "shard-00001-model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="d: two files have the same part of it"):
        values_in(tmp_path / "right")
    for path in tmp_path.glob("right/shard-00001-*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="lacks shard 1 of 2 or more"):
        values_in(tmp_path / "right")
    (tmp_path / "forged").mkdir()
    (tmp_path / "forged" / "shard-99999999999-a.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="lacks shard 1 of 99999999999 or more"):
        values_in(tmp_path / "forged")
    with pytest.raises(ConfigError, match="a missing last one would not be noticed: name the model by config"):
        consolidate(shards(tmp_path / "plain", places), tmp_path / "made")


# -- files of ranks ----------------------------------------------------------------------------------------------------


def rank_file(folder: Path, rank: int, state: Any, count: int = 2) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / f"model_world_size_{count}_rank_{rank}.pt")


def test_tensors_in_lists_are_left_out_and_said(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "ema": [torch.ones(3), 1], "more": {"a": (None, {"b": torch.ones(2)})}}
    for rank in range(2):
        rank_file(tmp_path, rank, state)
    with Executor() as executor:
        model = open_model(str(tmp_path), executor)
    assert list(model.tensors) == ["w"] and sorted(model.left_out) == ["ema.0", "more.a.1.b"]


def test_an_empty_tensor_of_ranks_is_read(tmp_path: Path) -> None:
    for rank in range(2):
        rank_file(tmp_path, rank, {"model": {"w": torch.ones(2), "empty": torch.ones(0, 5)}})
    assert values_in(tmp_path)["empty"].shape == (0, 5)


@pytest.mark.parametrize("has_checksums", [True, False])
def test_what_all_ranks_have_is_compared(has_checksums: bool, tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(has_checksums)
    try:
        for rank in range(2):
            rank_file(tmp_path / "saved", rank, {"model": {"a": torch.ones(3)}, "note": "text"})
        assert torch.equal(values_in(tmp_path / "saved")["a"], torch.ones(3))
        rank_file(tmp_path / "saved", 1, {"model": {"a": torch.zeros(3)}})
    finally:
        torch.serialization.set_crc32_options(before)
    with pytest.raises(CheckpointError, match=r"rank_1\.pt: model\.a has other values than the same part in .*rank_0"):
        values_in(tmp_path / "saved")


def test_a_mesh_may_have_hundreds_of_ranks() -> None:
    tree = objects((CORPUS / "rank_file" / "dtensor").read_bytes(), "x.pt")
    file = TorchObjects("x.pt", 4096, "", "", tree, {})
    value = tree["w"]
    value.state[1]["_spec"].state["mesh"].state["_flatten_rank_map"] = tuple(range(512))
    assert _dtensor(file, "w", value, 512).shape == (3, 2)
    with pytest.raises(CheckpointError, match="w: is not a DTensor"):
        _dtensor(file, "w", value, 511)


@pytest.mark.parametrize(
    ("num_dims", "size", "factor", "text"),
    [
        (1, 1 << 40, 1 << 39, r"cut it into 549755813888 groups, .* only 2 ranks"),
        (30, 4, 2, "has fewer elements than pieces"),
    ],
)
def test_a_forged_cut_does_not_make_as_many_pieces_as_it_says(num_dims: int, size: int, factor: int, text: str) -> None:
    """One element is stored, which a stride of 0 repeats."""
    file = TorchObjects("f.pt", 4, "", "", None, {"0": _Entry(0, 4, 0)})
    storage, zeros = Storage("0", torch.float32, 1), (0,) * num_dims
    local = Tensor(storage, torch.float32, 0, (size // 2,) * num_dims, zeros)
    states = [{"dim": dim, "split_factor": factor} for dim in range(num_dims)]
    cuts = tuple(Foreign("torch.distributed.tensor.placement_types._StridedShard", (), state) for state in states)
    with pytest.raises(CheckpointError, match=text):
        list(_tiles("w", _of_file(file, "w", local, (size,) * num_dims, cuts, zeros), [2] * num_dims, 2))


def in_many_places() -> Any:
    """Return what has a short pickle, and more entries than anybody can count."""
    state: Any = {"a": 1}
    for _ in range(14):
        state = dict.fromkeys(range(10), state)
    return state


def in_itself() -> Any:
    state: dict[str, Any] = {}
    state["model"] = state
    return state


@pytest.mark.parametrize("state", [in_many_places(), in_itself(), {"a": [in_many_places()]}])
def test_containers_in_many_places_are_refused(state: Any, tmp_path: Path) -> None:
    rank_file(tmp_path, 0, state, 1)
    with pytest.raises(CheckpointError, match="or one container in so many places that its pickle has fewer bytes"):
        values_in(tmp_path)


def test_files_that_are_not_one_save_are_named(tmp_path: Path) -> None:
    rank_file(tmp_path / "one", 0, {"a": torch.ones(3)})
    with pytest.raises(CheckpointError, match="has files of ranks 0 of 2; copy"):
        values_in(tmp_path / "one")
    for name in ("model_world_size_99999999999_rank_0.pt", "pytorch_model_fsdp_0_rank99999999999.bin"):
        (tmp_path / name[:9]).mkdir()
        (tmp_path / name[:9] / name).write_bytes(b"")  # a list of all ranks would take all memory
        with pytest.raises(CheckpointError, match=r"has files of ranks \d+ of \d{11,12}; copy"):
            values_in(tmp_path / name[:9])
    for count in (1, 2):
        rank_file(tmp_path / "two", 0, {"a": torch.ones(3)}, count)
    with pytest.raises(CheckpointError, match="has files of several jobs"):
        values_in(tmp_path / "two")
    rank_file(tmp_path / "flat", 0, {"model._flat_param": torch.ones(3)}, 1)
    with pytest.raises(UnsupportedError, match="is a flat parameter of FSDP1"):
        values_in(tmp_path / "flat")
    (tmp_path / "step" / "actor").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="name one model in it: actor"):
        values_in(tmp_path / "step")
    with pytest.raises(CheckpointError, match="no such folder"):
        values_in(tmp_path / "none")


# -- two saves in one folder -------------------------------------------------------------------------------------------


def dated(folder: Path, ages: dict[str, float]) -> None:
    for name, age in ages.items():
        os.utime(folder / name, (1e9 - age, 1e9 - age))


@pytest.mark.parametrize(
    ("ages", "is_one"),
    [
        ((9, 8, 7), True),  # as it was saved
        ((900, 800, 7), True),  # ranks that wrote slowly
        ((7, 8, 9), True),  # copied by name, without times
        ((9, 6.5, 7), True),
        ((9, 0, 7), False),  # the second rank's file is of a later save, which ended before .metadata
        ((900, 0, 700), False),
    ],
)
def test_a_file_of_a_later_save_is_refused(ages: tuple[float, ...], is_one: bool, tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "b": torch.ones(2)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "x", thread_count=2), no_dist=True)
    dated(tmp_path / "x", dict(zip(("__0_0.distcp", "__0_1.distcp", ".metadata"), ages, strict=True)))
    with contextlib.nullcontext() if is_one else pytest.raises(CheckpointError, match=r"__0_1.distcp: was written at "):
        values_in(tmp_path / "x")


@pytest.mark.parametrize(("ages", "is_one"), [((0, 1), True), ((9, 0), True), ((0, 60), False), ((60, 0), False)])
def test_files_of_ranks_that_are_far_apart_are_refused(ages: tuple[float, float], is_one: bool, tmp_path: Path) -> None:
    for rank, age in enumerate(ages):
        rank_file(tmp_path / "x", rank, {"a": torch.ones(3)}, 2)
        dated(tmp_path / "x", {f"model_world_size_2_rank_{rank}.pt": age})
    with contextlib.nullcontext() if is_one else pytest.raises(CheckpointError, match="a save over an earlier one"):
        values_in(tmp_path / "x")


# -- names -------------------------------------------------------------------------------------------------------------


def found(*names: str, part: str | None = None) -> NamedWeights[int]:
    """What is found in a flat state dict: the number of each name."""
    return weights_in("x", {(name,): number for number, name in enumerate(names)}, part)


def test_names_lose_what_all_of_them_begin_with() -> None:
    weights = found("module._orig_mod.model.w", "module._orig_mod.head")
    assert (weights.model, weights.removed) == ({"model.w": 0, "head": 1}, "module._orig_mod.")
    assert found("module.a", "b").model == {"module.a": 0, "b": 1}
    names = ("b.w", "b._orig_mod.w", "layers.0._checkpoint_wrapped_module.w")
    assert [*found(*names).model] == [*names]


def test_a_model_that_checks_names_has_no_wrappers_in_them() -> None:
    names = ("layers.0._checkpoint_wrapped_module._orig_mod.w", "b.w", "b._orig_mod.w", "c._orig_mod", "d.module.w")
    plain = ["layers.0.w", "b.w", "b._orig_mod.w", "c._orig_mod", "d.module.w"]
    assert without_wrappers("x", names) == dict(zip(names, plain, strict=True))


def test_the_part_that_is_the_model_is_found() -> None:
    entries = {("model", "w"): 1, ("ema", "w"): 2, ("optimizer", "state", "w", "exp_avg"): 3}
    assert weights_in("x", entries, None).model == {"w": 1}
    assert weights_in("x", entries, None).left_out == ("ema.w", "optimizer.state.w.exp_avg")
    assert weights_in("x", entries, "ema").model == {"w": 2}
    assert weights_in("x", {("app", "model", "w"): 1, ("app", "optim", "w"): 2}, None).model == {"w": 1}
    assert weights_in("x", {("epoch",): 1, ("model", "w"): 2}, None).model == {"w": 2}
    with pytest.raises(ConfigError, match="parts 'ema', 'student'; say which is the model: part="):
        weights_in("x", {("ema", "w"): 1, ("student", "w"): 2}, None)
    with pytest.raises(ConfigError, match="say which is the model: part="):
        weights_in("x", {("w",): 1, ("a._extra_state", "model", "w"): 2}, None)
    with pytest.raises(ConfigError, match=r"has no part 'emma'; it has 'ema', 'model', 'optimizer\.state\.w'"):
        weights_in("x", entries, "emma")
    with pytest.raises(CheckpointError, match="has no weights of a model; its parts are 'optimizer'"):
        weights_in("x", {("optimizer", "w"): 1}, None)


@pytest.mark.parametrize("adapter", ["default", "model", "policy", "q", "lora_A", "weight", "base_layer"])
def test_the_name_of_an_adapter_is_found(adapter: str) -> None:
    base = "base_model.model.q.base_layer.weight"
    for name in ("lora_A.{}.weight", "lora_embedding_A.{}", "token_adapter.trainable_tokens_delta.{}"):
        assert found(base, f"base_model.model.q.{name.format(adapter)}").adapter == adapter
    for name in ("lora_A.weight", "lora_embedding_A", "token_adapter.trainable_tokens_delta"):
        assert found(f"base_model.model.q.{name}").adapter == ""
    assert found(base).adapter is found("q.lora_A.default.weight").adapter is None
    assert found(base, "base_model.model.q.lora_A.default").adapter is None  # of AdaLoRA


def test_several_adapters_are_refused() -> None:
    before = "base_model.model."
    with pytest.raises(ConfigError, match="has the adapters a, b"):
        found(f"{before}q.lora_A.a.weight", f"{before}q.lora_A.b.weight")
    entries = {(f"{before}q.base_layer.weight",): 0, (f"{before}q.ia3_l.default",): 0}
    with pytest.raises(UnsupportedError, match="is of an adapter that is not of LoRA"):
        weights_in("x", entries, None, has_adapter_config=True)


MALFORMED, OTHER = "r, or a value of rank_pattern, is not the rank of an adapter", "it is of another adapter"


@pytest.mark.parametrize(
    ("values", "shape", "text"),
    [
        *(({"rank_pattern": value}, (2, 3), MALFORMED) for value in (5, [[]], {"q": []}, {"q": 1 << 99})),
        *(({"r": value}, (2, 3), MALFORMED) for value in ([2], None, "2")),
        *(({"rank_pattern": {"q": 3}}, shape, f"says r=2, but .*: {OTHER}") for shape in ((), (4, 3))),
        ({"use_dora": True}, (2, 3), f"but the checkpoint lacks tensors lora_magnitude_vector: {OTHER}"),
    ],
)
def test_an_adapter_has_its_own_configuration(values: Any, shape: tuple[int, ...], text: str, tmp_path: Path) -> None:
    rank_file(tmp_path, 0, {"base_model.model.q.lora_A.weight": torch.ones(shape)}, 1)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, **values}))
    with pytest.raises(CheckpointError, match=rf"adapter_config\.json: .*{text}"):
        consolidate(tmp_path, tmp_path / "made")
