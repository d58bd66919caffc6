"""A folder that is saved appears all at once, whatever happens meanwhile."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.saving import folder as folders
from lowmem_load.saving.folder import PROBE, Staging
from lowmem_load.saving.writer import FileLayout

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


class Crash(BaseException):
    """The process ends here."""


def staged(target: Path, files: Mapping[str, bytes] = MappingProxyType({}), others: Sequence[str] = ()) -> Staging:
    """Make a staging folder; `others` are the paths of other ranks."""
    layouts = [FileLayout(name, content, len(content), {}) for name, content in files.items()]
    return folders.make_staging([folders.find_target(target), *others], layouts)


def stage(target: Path, text: str, *, sharded: bool = True) -> tuple[Staging, list[str]]:
    """Stage a save whose every file says `text`."""
    weights = SHARDS if sharded else ["model.safetensors"]
    staging = staged(target, dict.fromkeys(weights, text.encode()))
    scratch = target.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    (scratch / "config.json").write_text(text)
    if sharded:
        (scratch / INDEX).write_text(json.dumps({"weights": SHARDS, "text": text}))
    folders.put_beside(staging, scratch)
    return staging, weights


def save(target: Path, text: str, *, sharded: bool = True) -> None:
    folders.commit(*stage(target, text, sharded=sharded))


def loaded(target: Path) -> set[str] | None:
    """What a loader would read there, as transformers chooses files; None if it finds none."""
    if (target / "model.safetensors").exists():
        return {(target / "model.safetensors").read_text()}
    if (target / INDEX).exists():
        index = json.loads((target / INDEX).read_text())
        return {index["text"], *((target / name).read_text() for name in index["weights"])}
    return None


def refused(*_: Any) -> bool:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def not_exchanged(*_: Any) -> int:
    ctypes.set_errno(errno.EXDEV)
    return -1


def renamed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system have no call that exchanges folders."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())


def beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path.name not in ("scratch", target.name))


@pytest.fixture(params=["exchanged", "renamed twice", "inside", "refused"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "renamed twice":
        renamed_twice(monkeypatch)
    if request.param == "inside":
        monkeypatch.setattr(os.path, "ismount", lambda _: True)
    if request.param == "refused":  # as by overlayfs, of a folder of the image that a container was made of
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(renameat2=not_exchanged))
    return str(request.param)


def test_a_new_folder_appears(tmp_path: Path, way: str) -> None:
    target = tmp_path / "some" / "model"
    save(target, "new")
    assert sorted(path.name for path in target.iterdir()) == sorted([*SHARDS, INDEX, "config.json"])
    assert loaded(target) == {"new"} and beside(target) == []


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_folder_is_replaced_and_keeps_what_is_not_saved(tmp_path: Path, way: str, before: bool, after: bool) -> None:
    target = tmp_path / "model"
    save(target, "old", sharded=before)
    (target / "README.md").write_text("mine")
    (target / "checkpoint-1" / "global_step1").mkdir(parents=True)
    (target / "checkpoint-1" / "global_step1" / "state.pt").write_text("mine")
    (target / "model-00003-of-00003.safetensors").write_text("of a save with three shards")
    (target / "adapter_model.safetensors").write_text("another's")
    target.chmod(0o750)
    save(target, "new", sharded=after)
    assert loaded(target) == {"new"}
    weights = {*SHARDS, INDEX} if after else {"model.safetensors"}
    kept = {"README.md", "checkpoint-1", "adapter_model.safetensors"}
    assert {path.name for path in target.iterdir()} == weights | kept | {"config.json"}
    assert (target / "checkpoint-1" / "global_step1" / "state.pt").read_text() == "mine"
    assert target.stat().st_mode & 0o777 == 0o750
    assert beside(target) == []


def test_what_is_inside_another_folder_goes_there(tmp_path: Path) -> None:
    """Adapters of PEFT that are not the default one have folders of their own."""
    target = tmp_path / "model"
    for text in ("old", "new"):
        staging = staged(target, {"second/adapter_model.safetensors": text.encode()})
        folders.commit(staging, ["second/adapter_model.safetensors"])
        (target / "second" / "notes").write_text("mine")
    assert (target / "second" / "adapter_model.safetensors").read_text() == "new"
    assert (target / "second" / "notes").read_text() == "mine"


def steps(monkeypatch: pytest.MonkeyPatch, crash_at: int) -> list[int]:
    """Have the `crash_at`-th change to the file system end the process; return a list that counts them."""
    counted = [0]

    def ending(ordinary: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[0] += 1
            if counted[0] == crash_at:
                raise Crash
            return ordinary(*args, **kwargs)

        return call

    for owner, name in ((os, "rename"), (os, "unlink"), (os, "mkdir"), (os, "rmdir"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, ending(getattr(owner, name)))
    system = ctypes.CDLL(None, use_errno=True)
    if hasattr(system, "renameat2"):
        exchanging = SimpleNamespace(renameat2=ending(system.renameat2))
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: exchanging)
    return counted


@pytest.mark.parametrize("sharded", [True, False])
def test_a_crash_at_any_step_leaves_one_model_or_the_other(
    tmp_path: Path, way: str, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for crash_at in range(1, 100):
        target = tmp_path / str(crash_at) / "model"
        save(target, "old", sharded=sharded)
        (target / "README.md").write_text("mine")
        staging, weights = stage(target, "new", sharded=sharded)
        with monkeypatch.context() as patch:
            counted = steps(patch, crash_at)
            try:
                folders.commit(staging, weights)
            except Crash:
                folders.discard(staging)  # at worst: a handler runs
        seen.append(loaded(target))
        everywhere = [path.read_text() for path in target.parent.rglob("*") if path.is_file()]
        assert "mine" in everywhere
        if seen[-1] is None:
            assert everywhere.count("old") + everywhere.count("new") >= 2 * len(weights), "both are on the disk"
        if counted[0] < crash_at:
            break
        save(target, "newer", sharded=sharded)
        assert loaded(target) == {"newer"}
        if way == "exchanged":
            assert (target / "README.md").read_text() == "mine" and beside(target) == []
    assert seen[0] == {"old"} and seen[-1] == {"new"}
    assert all(state in ({"old"}, {"new"}, None) for state in seen)
    if way == "exchanged":
        assert None not in seen
    print(way, ["-" if state is None else "".join(state) for state in seen])


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path, way: str) -> None:
    target = tmp_path / "model"
    save(target, "old")
    staging, _ = stage(target, "killed")
    others = staged(tmp_path / "model2")
    save(target, "new")
    assert not staging.path.exists()
    assert (others.path / PROBE).exists(), "another folder's is left alone"


def test_a_failed_save_leaves_nothing(tmp_path: Path, way: str) -> None:
    target = tmp_path / "model"
    save(target, "old")
    staging, _ = stage(target, "failed")
    folders.discard(staging)
    assert loaded(target) == {"old"} and beside(target) == []
    assert not any(path.name.startswith(".") for path in target.iterdir())


def test_a_discard_that_is_killed_leaves_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a failed save have their length and no values: none may come into the folder."""
    target = tmp_path / "model"
    target.mkdir()
    (target / "README.md").write_text("mine")
    staging = staged(target, {"model.safetensors": bytes(8)})

    def killed(folder: Path, **_: Any) -> None:
        (folder / PROBE).unlink()
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(Crash):
            folders.discard(staging)
    folders.commit(staged(target, {"adapter_model.safetensors": b"new"}), ["adapter_model.safetensors"])
    assert {path.name for path in target.iterdir()} == {"README.md", "adapter_model.safetensors"}
    assert beside(target) == []


def test_a_folder_that_other_ranks_do_not_see_is_refused(tmp_path: Path) -> None:
    staging, _ = stage(tmp_path / "model", "new")
    folders.check_seen(staging, str(staging.path))
    for spoil in (lambda: (staging.path / PROBE).write_text("another"), (staging.path / PROBE).unlink):
        spoil()
        with pytest.raises(ConfigError, match=r"does not see .*: it looked for .*, rank 0 made /mnt/\.model\.saving-0"):
            folders.check_seen(staging, "/mnt/.model.saving-0")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs [\d.]+ TiB, but [\d.]+ \w+ are free"):
        folders.make_staging([folders.find_target(tmp_path / "model")], [FileLayout("f", b"", 1 << 60, {})])
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "model", "old")
    with pytest.raises(ConfigError, match=r"needs [\d.]+ TiB beside the former files, .* but [\d.]+ \w+ are free"):
        folders.make_staging([folders.find_target(tmp_path / "model")], [FileLayout("f", b"", 1 << 60, {})])
    assert loaded(tmp_path / "model") == {"old"} and beside(tmp_path / "model") == []


def test_what_was_killed_right_after_the_exchange_does_not_cost_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What marks an unfinished save is in the folder itself then, and the next save may fail or be killed as well."""
    target = tmp_path / "model"
    save(target, "old")
    (target / "README.md").write_text("mine")
    (target / PROBE).write_text("of the killed save")
    staging, weights = stage(target, "new")
    ordinary = os.rename

    def rename(source: Path, destination: Path) -> None:
        ordinary(source, destination) if source.name != "README.md" else refused()

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(ConfigError, match="cannot take its place"):
            folders.commit(staging, weights)
    folders.discard(staging)
    save(target, "newer")
    assert loaded(target) == {"newer"} and (target / "README.md").read_text() == "mine"
    assert beside(target) == [] and not (target / PROBE).exists()


def test_two_renames_of_which_one_is_refused_fall_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, ordinary = tmp_path / "model", os.rename
    save(target, "old")
    staging, weights = stage(target, "new")

    def rename(source: Path, destination: Path) -> None:
        if source == target:
            refused()
        ordinary(source, destination)

    renamed_twice(monkeypatch)
    monkeypatch.setattr(os, "rename", rename)
    folders.commit(staging, weights)
    assert loaded(target) == {"new"} and beside(target) == []


@pytest.mark.parametrize("why", ["it has a mount point", "somebody works there"])
def test_a_folder_that_must_stay_is_not_renamed(tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    save(target, "old")
    (target / "checkpoints").mkdir()
    if why == "somebody works there":
        monkeypatch.chdir(target)
    else:
        monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "checkpoints")
    staging, weights = stage(target, "new")
    assert staging.is_inside
    folders.commit(staging, weights)
    assert loaded(target) == {"new"} and (target / "checkpoints").is_dir()
    assert why == "it has a mount point" or loaded(Path()) == {"new"}


def test_a_folder_that_cannot_be_marked_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", refused)
    with pytest.raises(ConfigError, match="cannot be saved to"):
        staged(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        staged(tmp_path / "model")
    with pytest.raises(ConfigError, match="cannot be saved to: "):
        staged(tmp_path / "model" / "below")


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    save(tmp_path / "model", "old")
    (tmp_path / "link").symlink_to("model")
    save(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and loaded(tmp_path / "model") == {"new"}


@pytest.mark.parametrize("weights", ["model.fp16-00001-of-00002.safetensors", "model.fp16.safetensors"])
def test_weights_of_a_variant_replace_those_of_the_same_variant(tmp_path: Path, weights: str) -> None:
    stale = {"model.fp16-00007-of-00009.safetensors", "model.fp16.safetensors", "model.safetensors.index.fp16.json"}
    others = {"model.safetensors", "model-00001-of-00002.safetensors", INDEX}
    target = tmp_path / "model"
    target.mkdir()
    for name in stale | others:
        (target / name).write_text("old")
    staging = staged(target, {weights: b"new"})
    folders.commit(staging, [weights])
    assert {path.name for path in target.iterdir()} == others | {weights}


def test_files_of_torch_are_weights_as_well(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders prefer one file to several. Where files are replaced one by one, what opens the new ones comes last."""
    index, shards = "pytorch_model.bin.index.json", [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    target, ordinary, moved = tmp_path / "model", os.rename, []
    target.mkdir()
    (target / "pytorch_model.bin").write_text("old")
    staging = staged(target, {index: b"new", **dict.fromkeys(shards, b"new")})
    monkeypatch.setattr(os, "rename", lambda old, new: moved.append(Path(old).name) or ordinary(old, new))
    folders.commit(staging, shards)
    assert {path.name for path in target.iterdir()} == {index, *shards}
    if way in ("inside", "refused"):
        assert moved[:4] == ["pytorch_model.bin", *shards, index]


def test_a_folder_of_two_names_is_changed_inside(tmp_path: Path) -> None:
    """Another node may have mounted the folder itself, under another name: it does not see what is beside it."""
    target = tmp_path / "model"
    save(target, "old")
    assert not staged(target, others=[str(target)]).is_inside
    staging = staged(target, others=["/mnt/other"])
    assert staging.is_inside
    (tmp_path / "other").symlink_to("model")
    folders.check_seen(Staging(tmp_path / "other", staging.token, is_inside=True), str(staging.path))
    fresh = staged(tmp_path / "new", others=[str(tmp_path / "another")])
    with pytest.raises(ConfigError, match="name the same folder on each"):
        folders.check_seen(Staging(tmp_path / "another", fresh.token, fresh.is_inside), str(fresh.path))


def test_a_file_without_allocation_has_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    for call in (None, unsupported):
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, call=call, **__: SimpleNamespace(fallocate=call))
        file = FileLayout("f", b"head", 10_000, {}, {9_000: b"others"})
        staging = folders.make_staging([folders.find_target(tmp_path / "model")], [file])
        assert (staging.path / "f").read_bytes() == b"head".ljust(9_000, b"\0") + b"others".ljust(1_000, b"\0")


def test_a_file_that_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fallocate=full))
    with pytest.raises(CheckpointError, match=r"f: cannot be made, with 4 bytes: .*No space left"):
        staged(tmp_path / "model", {"f": b"head"})
    assert list(tmp_path.iterdir()) == []
