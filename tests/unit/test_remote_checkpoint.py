"""Folders that stand for checkpoints in remote stores: what is looked up, fetched and refused."""

import fcntl
import json
import logging
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file

from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.errors import CheckpointError, HeaderError
from lowmem_load.files import object_store, stand_ins
from lowmem_load.files.object_store import RemoteObject
from lowmem_load.files.remote_checkpoint import _listed, folder_of_model, folder_of_url
from lowmem_load.files.remote_file import HEAD_BYTES
from lowmem_load.files.safetensors import Safetensors
from lowmem_load.files.source import LocalFile, read_bytes
from lowmem_load.files.stand_ins import is_stand_in, open_file, origin
from tests import ranks
from tests.hub import pointed_at
from tests.remote.answering import answering, assert_no_secrets, with_login
from tests.remote.hub_front import COMMIT, HubServer, hub_front
from tests.remote.range_server import RangeServer, range_server

CONFIG = b'{"model_type": "llama"}'


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_requests: None) -> Path:
    """The folder for temporary files, which begins empty with each test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def write_checkpoint(folder: Path, num_shards: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(CONFIG)
    names = [f"model-{number}.safetensors" for number in range(num_shards)] if num_shards > 1 else ["model.safetensors"]
    for number, name in enumerate(names):
        save_file({f"w{number}": torch.full((50_000,), number, dtype=torch.int32)}, folder / name)
    if num_shards > 1:
        weight_map = {f"w{number}": name for number, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "root" / "models" / "one")


@pytest.fixture
def server(checkpoint: Path) -> Iterator[RangeServer]:
    with range_server(checkpoint.parents[1]) as found:
        yield found


def url_of(server: RangeServer) -> str:
    return f"{server.url}/models/one"


def files_in(folder: str | Path) -> dict[str, int]:
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()
    }


# -- HTTP --------------------------------------------------------------------------------------------------------------


def test_a_folder_has_the_small_files_and_stands_for_the_large_ones(server: RangeServer, checkpoint: Path) -> None:
    folder = folder_of_url(url_of(server))
    index = (checkpoint / "model.safetensors.index.json").stat().st_size
    assert files_in(folder) == {
        "config.json": len(CONFIG),
        "model.safetensors.index.json": index,
        "model-0.safetensors": HEAD_BYTES,
        "model-1.safetensors": HEAD_BYTES,
    }
    assert os.path.basename(folder) == "one"
    assert is_stand_in(folder) and origin(folder) == url_of(server)
    server.reset()
    with_path = open_file(os.path.join(folder, "model-1.safetensors"))
    assert with_path.path == os.path.join(folder, "model-1.safetensors")
    assert origin(with_path.path) == f"{url_of(server)}/model-1.safetensors"
    described, local = (
        Safetensors().describe(each) for each in (with_path, LocalFile(str(checkpoint / "model-1.safetensors")))
    )
    assert described.digest == local.digest and described.names == local.names
    assert server.stats()["requests"] == 0  # the header is in the first bytes
    content = read_bytes(with_path, HEAD_BYTES, 1000)
    assert content == (checkpoint / "model-1.safetensors").read_bytes()[HEAD_BYTES : HEAD_BYTES + 1000]
    assert isinstance(open_file(os.path.join(folder, "config.json")), LocalFile)


def test_another_process_opens_the_files(server: RangeServer, checkpoint: Path, temporary: Path) -> None:
    """By the manifest: a worker that was spawned, a script that was told the folder."""
    path = os.path.join(folder_of_url(url_of(server)), "model-1.safetensors")
    code = (
        "import sys; from lowmem_load.files.source import read_bytes; "
        "from lowmem_load.files.stand_ins import open_file; "
        f"sys.stdout.buffer.write(read_bytes(open_file({path!r}), {HEAD_BYTES}, 1000))"
    )
    env = {**os.environ, "TMPDIR": str(temporary)}
    found = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, timeout=60).stdout
    assert found == (checkpoint / "model-1.safetensors").read_bytes()[HEAD_BYTES : HEAD_BYTES + 1000]


def test_a_manifest_that_is_not_in_the_own_folder_says_nothing(server: RangeServer, tmp_path: Path) -> None:
    """One in a checkpoint that was downloaded could have any place asked."""
    folder = Path(folder_of_url(url_of(server)))
    copied = tmp_path / "untrusted"
    shutil.copytree(folder.parent, copied)
    path = str(copied / folder.name / "model-0.safetensors")
    assert not is_stand_in(path) and isinstance(open_file(path), LocalFile)


def test_sums_name_the_files_where_the_server_does_not(server: RangeServer, checkpoint: Path) -> None:
    server.set(lists=False)
    with pytest.raises(CheckpointError, match=r"does not list its files; run `sha256sum \* > SHA256SUMS`"):
        folder_of_url(url_of(server))
    (checkpoint / "sub").mkdir()
    (checkpoint / "sub" / "tokenizer.json").write_text("{}")
    (checkpoint.parent / "outside").write_text("{}")
    names = ["config.json", "*model.safetensors.index.json", "./sub/tokenizer.json", "../outside", "absent.bin"]
    names += ["..\\outside", "sub/../../outside", "/etc/passwd", "a?b", "x" * 300]
    (checkpoint / "SHA256SUMS").write_text("".join(f"{'0' * 64}  {name}\n" for name in names))
    found = files_in(folder_of_url(url_of(server))).keys()
    assert found == {"SHA256SUMS", "config.json", "model.safetensors.index.json", "sub/tokenizer.json"}
    paths = [line.split(" ")[1] for line in server.stats()["asked"]]
    assert not [path for path in paths if "outside" in path or "passwd" in path or ".." in path]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ('<a href="../">up</a><a href="?C=N;O=D">Name</a><a href="config.json">config.json</a>', ["config.json"]),
        ("<A HREF='/models/one/config.json'>c</A> <a href=/models/two/x.json>x</a>", ["config.json"]),
        ('<a href="a%20b.json">a b</a><a href="&#97;.json">a</a><a href="sub/">s</a>', ["a b.json", "a.json"]),
        ('<a href="http://other/models/one/x.json">x</a><a href="//h/models/one/x.json">x</a><a href="%2e%2e">', []),
        ('<a href="http://[x/">x</a><a href="config.json">c</a>', ["config.json"]),
    ],
)
def test_pages_of_servers_are_read(page: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "read_list", lambda _, file: None if file else page.encode())
    if names:
        assert _listed("http://h/models/one", (), int) == names
    else:
        with pytest.raises(CheckpointError, match="does not list its files"):
            _listed("http://h/models/one", (), int)


def test_another_version_has_another_folder(server: RangeServer, checkpoint: Path) -> None:
    before = folder_of_url(url_of(server))
    save_file({"w0": torch.zeros(50_000)}, checkpoint / "model-0.safetensors")
    after = folder_of_url(url_of(server))
    assert after != before
    with pytest.raises(CheckpointError, match="was replaced after its header was read"):
        read_bytes(open_file(os.path.join(before, "model-0.safetensors")), HEAD_BYTES, 8)
    read_bytes(open_file(os.path.join(after, "model-0.safetensors")), HEAD_BYTES, 8)


def test_waiting_for_a_process_that_fills_the_folder_can_be_ended(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a rank would wait for it although another one has failed."""

    def held(path: str) -> FileLock:
        holder = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(holder, fcntl.LOCK_EX)
        holders.append(holder)
        return FileLock(path)

    def check() -> None:
        raise CheckpointError("another rank has failed")

    holders: list[int] = []
    monkeypatch.setattr(stand_ins, "FileLock", held)
    listing = {"model.safetensors": RemoteObject("http://h/m", "model.safetensors", 5, '"1"')}
    with pytest.raises(CheckpointError, match="another rank has failed"):
        stand_ins.lay_out("http://h/m", listing, lambda *_: b"", check)
    os.close(holders[0])


def test_a_subfolder_is_looked_into_on_request(server: RangeServer, checkpoint: Path) -> None:
    write_checkpoint(checkpoint / "sub", num_shards=1)
    assert not any(name.startswith("sub/") for name in files_in(folder_of_url(url_of(server))))
    for subfolder in ("sub", "/sub/"):
        found = files_in(folder_of_url(url_of(server), subfolder=subfolder))
        assert {"config.json", "sub/config.json", "sub/model.safetensors"} <= set(found)


@pytest.mark.parametrize("status", [403, 501])
def test_head_is_not_needed(status: int, server: RangeServer, checkpoint: Path) -> None:
    (checkpoint / "special_tokens_map.json").write_bytes(b"")  # of which there is no first byte
    server.set(head_status=status)
    assert "special_tokens_map.json" in files_in(folder_of_url(url_of(server)))
    assert set(server.stats()["methods"]) == {"GET"}


@pytest.mark.parametrize("name", ["ü b.safetensors", "%41.safetensors", "a+b.bin"])
def test_names_are_escaped(name: str, server: RangeServer, checkpoint: Path) -> None:
    (checkpoint / "model-0.safetensors").rename(checkpoint / name)
    folder = folder_of_url(url_of(server))
    assert name in files_in(folder)
    item = open_file(os.path.join(folder, name))
    assert read_bytes(item, HEAD_BYTES, 8) == (checkpoint / name).read_bytes()[HEAD_BYTES : HEAD_BYTES + 8]


def test_a_server_that_names_no_version_is_refused() -> None:
    with (
        answering({"Content-Range": "bytes 0-0/2"}, status=206, content=b"{") as url,
        pytest.raises(CheckpointError, match="sends no ETag and no Last-Modified, without which a file"),
    ):
        object_store.find(url, "config.json")


@pytest.mark.parametrize("behaviour", [{"weak_etags": True}, {"no_etags": True}])
def test_where_no_etag_is_strong_the_date_counts(
    behaviour: dict[str, bool], server: RangeServer, checkpoint: Path
) -> None:
    server.set(**behaviour)
    source = open_file(os.path.join(folder_of_url(url_of(server)), "model-0.safetensors"))
    assert source.version.startswith("20")
    content = (checkpoint / "model-0.safetensors").read_bytes()
    assert read_bytes(source, HEAD_BYTES, 1000) == content[HEAD_BYTES : HEAD_BYTES + 1000]
    os.utime(checkpoint / "model-0.safetensors", (1, 1))
    with pytest.raises(CheckpointError, match="was replaced after its header was read"):
        read_bytes(source, HEAD_BYTES, 1000)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "https://host:port/a",
        "http://[::1/a",
        "http://user:pass/word@host/a",
        "http://127.0.0.1:99999",
        "s3://",
    ],
)
def test_urls_that_name_no_host_are_one_error(url: str, impatient: None) -> None:
    began_s = time.monotonic()
    with pytest.raises(CheckpointError, match=r"://...: the URL does not name a host or bucket") as caught:
        folder_of_url(url)
    assert time.monotonic() - began_s < 5
    assert "/word" not in str(caught.value) and "pass/" not in str(caught.value)


ITEM = RemoteObject("s3://bucket", "a", 2, '"1"')


@pytest.mark.parametrize("last", ["..", ".", "x" * 300, "%00", "a%2Fb", "%2e%2e"])
def test_the_folder_is_inside_whatever_the_url_ends_with(last: str, temporary: Path) -> None:
    folder = Path(stand_ins.lay_out(f"http://host/{last}", {"config.json": ITEM}, lambda *_: b"{}", int))
    (base,) = temporary.iterdir()
    assert folder.resolve().parent.parent == base
    assert {path.suffix for path in base.iterdir() if path.is_file()} == {".lock"}


# -- files of strangers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [2**64 - 1, 101 << 20, 7])
def test_headers_of_hostile_sizes_are_refused(nbytes: int, server: RangeServer, checkpoint: Path) -> None:
    """Without asking for bytes that are not there, and without memory for them."""
    content = (checkpoint / "model-0.safetensors").read_bytes()
    (checkpoint / "model-0.safetensors").write_bytes(struct.pack("<Q", nbytes) + content[8:])
    source = open_file(os.path.join(folder_of_url(url_of(server)), "model-0.safetensors"))
    server.reset()
    with pytest.raises(HeaderError, match=r"-models-one-[0-9a-f]+/one/model-0\.safetensors: "):
        Safetensors().describe(source)
    assert server.stats()["bytes_sent"] == 0


@pytest.mark.parametrize("name", ["..", "a/../b", "/a", "a//b", "a\0b", "ü" * 200, "a\\b", "", "\ud800"])
def test_a_list_with_impossible_names_is_refused(name: str, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "list_files", lambda *_, **__: {name: ITEM})
    with pytest.raises(CheckpointError, match="s3://bucket/a: lists a file with the impossible name ") as caught:
        folder_of_url("s3://bucket/a")
    assert len(str(caught.value)) < 300
    assert not [path for path in temporary.rglob("*") if path.is_file()]


# -- the folder --------------------------------------------------------------------------------------------------------


def test_only_this_user_may_enter(server: RangeServer, temporary: Path) -> None:
    before = os.umask(0)
    try:
        folder = folder_of_url(url_of(server))
    finally:
        os.umask(before)
    (base,) = temporary.iterdir()
    assert base.name == f"lowmem_load-{os.getuid()}"
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(folder).parent.stat().st_mode) == 0o700
    assert Path(folder).parent.parent == base


@pytest.mark.parametrize("mode", [0o770, 0o755])
def test_a_folder_that_others_may_enter_is_refused(mode: int, server: RangeServer, temporary: Path) -> None:
    base = temporary / f"lowmem_load-{os.getuid()}"
    base.mkdir()
    base.chmod(mode)
    with pytest.raises(CheckpointError, match="belongs to another user, or others may write to it; remove it"):
        folder_of_url(url_of(server))
    assert list(base.iterdir()) == []


def test_a_fetch_that_fails_leaves_nothing(server: RangeServer, temporary: Path, impatient: None) -> None:
    server.set(error_500=1, only="model-1")
    with pytest.raises(CheckpointError):
        folder_of_url(url_of(server))
    server.set(error_500=0, reset_middle=1, only="model-1")
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: cannot be read: "):
        folder_of_url(url_of(server))
    (base,) = temporary.iterdir()
    assert [path.suffix for path in base.iterdir()] == [".lock"]
    server.set(reset_middle=0)
    folder_of_url(url_of(server))


def test_a_folder_that_was_cleaned_is_filled_again(server: RangeServer, checkpoint: Path) -> None:
    folder = Path(folder_of_url(url_of(server)))
    for broken in ("config.json", "model-0.safetensors"):
        (folder / broken).unlink()
        assert folder_of_url(url_of(server)) == str(folder)
    (folder / "config.json").write_bytes(b"")
    assert folder_of_url(url_of(server)) == str(folder)
    assert (folder / "config.json").read_bytes() == CONFIG
    shutil.rmtree(folder)
    folder_of_url(url_of(server))
    whole = (checkpoint / "model-1.safetensors").read_bytes()
    assert read_bytes(open_file(str(folder / "model-1.safetensors")), 0, len(whole)) == whole


def test_finding_files_ends_when_another_rank_fails(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "DELAYS_S", (5,))
    until_s = time.monotonic() + 0.5

    def check() -> None:
        if time.monotonic() > until_s:
            raise KeyboardInterrupt

    server.set(error_503=1.0)
    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        folder_of_url(url_of(server), check=check)
    assert time.monotonic() - start_s < 3


def open_folder(url: str, temporary: str) -> str:
    """Rank function: all at once."""
    tempfile.tempdir = temporary
    DistributedInterface().barrier()
    return folder_of_url(url)


@pytest.mark.ranks
def test_two_processes_fetch_small_files_once(server: RangeServer, temporary: Path) -> None:
    server.set(latency_ms=20)
    folders = ranks.run_ranks(open_folder, url_of(server), str(temporary))
    assert folders[0] == folders[1] != ""
    lines = [line for line in server.stats()["asked"] if not line.endswith(" bytes=0-0")]
    fetched = Counter(line.split(" ")[1].rpartition("/")[2] for line in lines)
    assert fetched["model-0.safetensors"] == fetched["model-1.safetensors"] == 1
    assert fetched["config.json"] == fetched["model.safetensors.index.json"] == 1


# -- the Hub -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path) -> Iterator[HubServer]:
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "README.md").write_text("# A model\n")
    (checkpoint / "picture.png").write_bytes(b"\x89PNG")
    with hub_front({"org/model": checkpoint}) as found, pointed_at(found.url, str(tmp_path / "cache")):
        yield found


def test_a_model_on_the_hub_is_pinned_to_its_commit(hub: HubServer, checkpoint: Path) -> None:
    folder, commit = folder_of_model("org/model")
    assert commit == COMMIT
    assert origin(folder) == "org/model"
    found = files_in(folder)
    here = {"config.json", "model.safetensors.index.json", "model-0.safetensors", "model-1.safetensors"}
    assert {name for name, nbytes in found.items() if nbytes} == here
    assert all(f"/resolve/{COMMIT}/" in path for path in hub.stats()["path_requests"] if "/resolve/" in path)
    assert open_file(os.path.join(folder, "model-1.safetensors")).version.startswith(f"{COMMIT} ")
    hub.commit = "d" * 40  # the branch has moved on
    assert folder_of_model("org/model") != (folder, commit)


def test_a_model_that_is_not_there_is_an_error(hub: HubServer) -> None:
    with pytest.raises(CheckpointError, match="org/other: no such folder, and the Hub says: 404"):
        folder_of_model("org/other")
    with pytest.raises(CheckpointError, match="org/model: no such folder, and the Hub says: 404"):
        folder_of_model("org/model", revision="other")
    with pytest.raises(CheckpointError, match="a/b/c: neither a folder nor a Hub id"):
        folder_of_model("a/b/c")


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_nothing_that_is_kept_has_secrets(
    server: RangeServer, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    folder = folder_of_url(with_login(url_of(server)))
    assert origin(folder) == url_of(server)
    for path in temporary.rglob("*"):
        assert_no_secrets(str(path), path.read_bytes().decode(errors="replace") if path.is_file() else "")
    assert_no_secrets(caplog.text, open_file(os.path.join(folder, "model-0.safetensors")).path)
    assert server.stats()["authorized"] > 0


def test_a_login_of_hf_endpoint_is_used_and_neither_kept_nor_quoted(
    checkpoint: Path, temporary: Path, tmp_path: Path
) -> None:
    def endpoint(url: str) -> str:
        return url.replace("http://", "http://user-name:pass%2Fword@")

    with hub_front({"org/model": checkpoint}) as hub, pointed_at(endpoint(hub.url), str(tmp_path / "cache")):
        folder, _ = folder_of_model("org/model")
        before = hub.stats()["authorized"]
        item = open_file(os.path.join(folder, "model-0.safetensors"))
        assert read_bytes(item, HEAD_BYTES, 8) == (checkpoint / item.path[-19:]).read_bytes()[HEAD_BYTES:][:8]
        assert hub.stats()["authorized"] > before > 0
        with pytest.raises(CheckpointError, match="and the Hub says: 404") as missing:
            folder_of_model("org/missing")
    with pointed_at(endpoint("http://127.0.0.1:9"), str(tmp_path / "cache")):
        with pytest.raises(CheckpointError, match=r"the Hub at http://127[.]0[.]0[.]1:9 cannot be reached") as gone:
            folder_of_model("org/model")
        with pytest.raises(CheckpointError, match="cannot be read: ") as unread:
            read_bytes(open_file(os.path.join(folder, "model-0.safetensors")), HEAD_BYTES, 8)
    for path in temporary.rglob("*"):
        assert_no_secrets(str(path), path.read_bytes().decode(errors="replace") if path.is_file() else "")
    texts = ["".join(traceback.format_exception(error.value)) for error in (missing, gone, unread)]
    assert_no_secrets(repr(item), *texts)
