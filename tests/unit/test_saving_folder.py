"""A folder that is saved appears all at once, whatever happens meanwhile."""

import ctypes
import errno
import json
import operator
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

import lowmem_load
from lowmem_load.errors import CheckpointError, ConfigError
from lowmem_load.weights_out import folder as folders
from lowmem_load.weights_out.folder import PROBE, Staging
from lowmem_load.weights_out.weight_files import FileLayout
from tests import builders

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The folder that is saved to."""
    return tmp_path / "model"


class Crash(BaseException):
    """The process ends here."""


def staged(target: Path, files: Mapping[str, bytes] = MappingProxyType({})) -> Staging:
    layouts = [FileLayout(name, content, len(content)) for name, content in files.items()]
    return folders.make_staging(folders.find_target(target), layouts)


def stage(target: Path, text: str, *, sharded: bool = True) -> Staging:
    """Stage a save whose every file says `text`."""
    weights = SHARDS if sharded else ["model.safetensors"]
    staging = staged(target, dict.fromkeys(weights, text.encode()))
    scratch = target.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    (scratch / "config.json").write_text(text)
    if sharded:
        (scratch / INDEX).write_text(json.dumps({"weights": SHARDS, "text": text}))
    folders.add_files(staging, scratch)
    return staging


def save(target: Path, text: str, *, sharded: bool = True) -> None:
    folders.commit(stage(target, text, sharded=sharded))


def loaded(target: Path) -> set[str] | None:
    """What a loader would read there, as transformers chooses files; None if it finds none."""
    if (target / "model.safetensors").exists():
        return {(target / "model.safetensors").read_text()}
    if (target / INDEX).exists():
        index = json.loads((target / INDEX).read_text())
        return {index["text"], *((target / name).read_text() for name in index["weights"])}
    return None


def next_to(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir() if path.name not in ("scratch", target.name))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_a_folder_is_replaced_and_keeps_what_is_not_saved(target: Path, before: bool, after: bool) -> None:
    save(target, "old", sharded=before)
    (target / "README.md").write_text("mine")
    (target / "checkpoint-1" / "global_step1").mkdir(parents=True)
    (target / "checkpoint-1" / "global_step1" / "state.pt").write_text("mine")
    (target / "model-00003-of-00003.safetensors").write_text("of a save with three shards")
    (target / "adapter_model.safetensors").write_text("another's")
    save(target, "new", sharded=after)
    assert loaded(target) == {"new"}
    weights = {*SHARDS, INDEX} if after else {"model.safetensors"}
    kept = {"README.md", "checkpoint-1", "adapter_model.safetensors"}
    assert {path.name for path in target.iterdir()} == weights | kept | {"config.json"}
    assert (target / "checkpoint-1" / "global_step1" / "state.pt").read_text() == "mine"
    assert next_to(target) == []


def test_what_is_inside_another_folder_goes_there(target: Path) -> None:
    """Adapters of PEFT that are not the default one have folders of their own."""
    for text in ("old", "new"):
        staging = staged(target, {"second/adapter_model.safetensors": text.encode()})
        folders.commit(staging)
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
    return counted


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_crash_at_any_step_leaves_one_model_or_the_other_and_the_next_save_finishes(
    tmp_path: Path, sharded: bool, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for crash_at in range(1, 100):
        target = tmp_path / str(crash_at) / "model"
        if not is_new:
            save(target, "old", sharded=not sharded)
            (target / "README.md").write_text("mine")
            number = target.stat().st_ino
        staging = stage(target, "new", sharded=sharded)
        with monkeypatch.context() as patch:
            counted = steps(patch, crash_at)
            try:
                folders.commit(staging)
            except Crash:
                folders.discard(staging)  # at worst: a handler runs
        seen.append(loaded(target))
        if counted[0] < crash_at:
            break
        with pytest.raises(ConfigError, match="free; nothing was written"):  # the next save, which fails
            folders.make_staging(str(target), [FileLayout("f", b"", 1 << 60)])
        finished = loaded(target)
        if is_new:
            assert finished == seen[-1]
        else:
            assert finished in (seen[-1], {"new"})
            assert {path.name for path in target.iterdir()} == {"README.md", "config.json", *of_kind(finished, sharded)}
            assert target.stat().st_ino == number and next_to(target) == []
        save(target, "newer", sharded=sharded)
        assert loaded(target) == {"newer"} and next_to(target) == []
    assert seen[0] == (None if is_new else {"old"}) and seen[-1] == {"new"}
    assert all(state in ({"old"}, {"new"}, None) for state in seen)


def of_kind(found: set[str] | None, new_is_sharded: bool) -> set[str]:
    """Return the names of the weights of the old or the new model, of which one is sharded."""
    return {*SHARDS, INDEX} if (found == {"new"}) == new_is_sharded else {"model.safetensors"}


def test_a_folder_is_kept_with_all_that_is_its_own(target: Path) -> None:
    """Owner, group, the bit that passes the group on, and attributes, of which access lists and stripes are made."""
    target.mkdir()
    os.setxattr(target, "user.purpose", b"models")
    if os.getuid() == 0:
        os.chown(target, 1234, 4321)
    target.chmod(0o2775)
    fields = operator.attrgetter("st_ino", "st_mode", "st_uid", "st_gid")
    before = fields(target.stat())
    for text in ("old", "new"):
        save(target, text)
        assert fields(target.stat()) == before
        assert os.getxattr(target, "user.purpose") == b"models"
        assert (target / SHARDS[0]).stat().st_gid == before[-1]


def test_a_save_that_still_runs_is_left_alone(target: Path) -> None:
    """Two processes without a group may save one model to one folder."""
    save(target, "old")
    other = stage(target, "another's")
    token, _, machine = (other.path / PROBE).read_text().split()
    (other.path / PROBE).write_text(f"{token} {os.getppid()} {machine}")
    save(target, "new")
    assert loaded(target) == {"new"} and other.path.exists()
    folders.commit(other)
    assert loaded(target) == {"another's"}


def test_what_a_killed_save_left_is_removed_by_the_next(target: Path, tmp_path: Path) -> None:
    save(target, "old")
    staging = stage(target, "killed")
    others = staged(tmp_path / "model2")
    save(target, "new")
    assert not staging.path.exists()
    assert (others.path / PROBE).exists(), "another folder's is left alone"


def test_a_discard_that_is_killed_leaves_no_weights(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a failed save have their length and no values: none may come into the folder."""
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
    folders.commit(staged(target, {"adapter_model.safetensors": b"new"}))
    assert {path.name for path in target.iterdir()} == {"README.md", "adapter_model.safetensors"}
    assert next_to(target) == []


def test_a_folder_that_other_ranks_do_not_see_is_refused(tmp_path: Path) -> None:
    staging = stage(tmp_path / "model", "new")
    folders.check_seen(staging, str(staging.path))
    for spoil in (lambda: (staging.path / PROBE).write_text("another"), (staging.path / PROBE).unlink):
        spoil()
        with pytest.raises(ConfigError, match=r"does not see .*: it looked for .*, rank 0 made /mnt/\.model\.saving-0"):
            folders.check_seen(staging, "/mnt/.model.saving-0")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    target, huge = tmp_path / "model", [FileLayout("f", b"", 1 << 60)]
    with pytest.raises(ConfigError, match=r"needs [\d.]+ TiB, but [\d.]+ \w+ are free"):
        folders.make_staging(str(target), huge)
    assert list(tmp_path.iterdir()) == []
    save(target, "old")
    with pytest.raises(ConfigError, match=r"needs [\d.]+ TiB next to the former files, .* but [\d.]+ \w+ are free"):
        folders.make_staging(str(target), huge)
    assert loaded(target) == {"old"} and next_to(target) == []


def test_a_folder_where_a_file_has_to_go_is_refused_and_nothing_is_moved(target: Path) -> None:
    save(target, "old")
    (target / "config.json").unlink()
    (target / "config.json").mkdir()
    staging = stage(target, "new")
    with pytest.raises(
        ConfigError, match=r"cannot take its place: .*is a folder, where a file has to go: 'config\.json'"
    ):
        folders.commit(staging)
    folders.discard(staging)
    assert loaded(target) == {"old"} and not any(path.name.startswith(".") for path in target.iterdir())


def test_a_folder_that_appears_meanwhile_is_kept(target: Path) -> None:
    staging = stage(target, "new")
    target.mkdir()
    (target / "tokenizer.json").write_text("mine")
    folders.commit(staging)
    assert loaded(target) == {"new"} and (target / "tokenizer.json").exists() and next_to(target) == []


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
def test_weights_of_a_variant_replace_those_of_the_same_variant(target: Path, weights: str) -> None:
    stale = {"model.fp16-00007-of-00009.safetensors", "model.fp16.safetensors", "model.safetensors.index.fp16.json"}
    others = {"model.safetensors", "model-00001-of-00002.safetensors", INDEX}
    target.mkdir()
    for name in stale | others:
        (target / name).write_text("old")
    staging = staged(target, {weights: b"new"})
    folders.commit(staging)
    assert {path.name for path in target.iterdir()} == others | {weights}


def test_files_of_torch_are_weights_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaders prefer one file to several. Where files are replaced one by one, what opens the new ones comes last."""
    index, shards = "pytorch_model.bin.index.json", [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    target, ordinary, moved = tmp_path / "model", os.rename, []
    target.mkdir()
    (target / "pytorch_model.bin").write_text("old")
    staging = staged(target, {index: b"new", **dict.fromkeys(shards, b"new")})
    monkeypatch.setattr(os, "rename", lambda old, new: moved.append(Path(old).name) or ordinary(old, new))
    folders.commit(staging)
    assert {path.name for path in target.iterdir()} == {index, *shards}
    assert [name for name in moved if not name.startswith(".")] == ["pytorch_model.bin", *shards, index]


def allocation_fails(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have `fallocate` fail with an error; 0 means that the system has no such function."""

    def fallocate(*_: Any) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(fallocate=fallocate if number else None))


def test_a_file_without_allocation_has_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (0, errno.EOPNOTSUPP):
        allocation_fails(monkeypatch, number)
        file = FileLayout("f", b"head", 10_000, constants={9_000: b"others"})
        staging = folders.make_staging(folders.find_target(tmp_path / "model"), [file])
        assert (staging.path / "f").read_bytes() == b"head".ljust(9_000, b"\0") + b"others".ljust(1_000, b"\0")


def test_a_file_that_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocation_fails(monkeypatch, errno.ENOSPC)
    with pytest.raises(CheckpointError, match=r"f: cannot be made, with 4 bytes: .*No space left"):
        staged(tmp_path / "model", {"f": b"head"})
    assert list(tmp_path.iterdir()) == []


def test_a_module_is_saved_by_a_lone_process_without_a_group_or_deepspeed(tmp_path: Path) -> None:
    """And with one, that a script has made, without DeepSpeed."""
    code = f"""
import sys, torch, torch.distributed as dist, lowmem_load
model = torch.nn.Linear(3, 2)
lowmem_load.save_model(model, {str(tmp_path / "alone")!r})
assert not dist.is_initialized()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
lowmem_load.save_model(model, {str(tmp_path / "group")!r})
assert "deepspeed" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert os.listdir(tmp_path / "alone") == os.listdir(tmp_path / "group") == ["model.safetensors"]


@pytest.mark.parametrize("where", ["save_model", "consolidate", "path", "lazy"])
def test_urls_are_refused_wherever_files_are_written(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoints: Path
) -> None:
    url, llama = "hf://buckets/org/run", str(builders.tiny_llama(checkpoints))
    ways: dict[str, Callable[[], Any]] = {
        "save_model": lambda: lowmem_load.save_model(torch.nn.Linear(2, 2), url),
        "consolidate": lambda: lowmem_load.consolidate(tmp_path, url),
        "path": lambda: lowmem_load.save_model(torch.nn.Linear(2, 2), Path("s3://bucket/run")),
        "lazy": lambda: lowmem_load.lazy(llama).save_pretrained("s3://bucket/run"),
    }
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^(s3|hf):/.*/run: is a URL that cannot be written to here"):
        ways[where]()
    assert list(tmp_path.iterdir()) == []
