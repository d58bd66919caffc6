"""What is known of files, and `verify_checkpoint`: in the forms that huggingface_hub and sha256sum really write."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
from pathlib import Path

import pytest
from huggingface_hub._local_folder import write_download_metadata
from huggingface_hub.utils.sha import git_hash

from lowmem_load import CheckpointError, verify_checkpoint
from lowmem_load.io import checksums
from lowmem_load.io.checksums import GIT, SHA256, Checksum, checksums_of
from lowmem_load.io.source import LocalFile
from lowmem_load.pipeline.verify_checkpoint import CHUNK_BYTES, hash_source

DATA, CONFIG = bytes(range(256)) * 40, b'{"architectures": ["LlamaForCausalLM"]}'
SHA = hashlib.sha256(DATA).hexdigest()
OTHER = hashlib.sha256(b"").hexdigest()
COMMIT = "2439f60ef33a0d46d85da5001d52aeda5b00ce9f"
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir()
    (made / WEIGHTS).write_bytes(DATA)
    (made / "config.json").write_bytes(CONFIG)
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The cache of the Hub with one model, whose weights lie in the store that repositories share."""
    repository = tmp_path / "hub" / "models--org--model"
    snapshot, blobs, shared = repository / "snapshots" / COMMIT, repository / "blobs", tmp_path / "hub" / "blobs" / "aa"
    for made in (snapshot, blobs, shared, repository / "refs"):
        made.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (shared / ("aa" * 32)).write_bytes(DATA)  # named by Xet's hash, which is no SHA-256
    (blobs / SHA).symlink_to(f"../../blobs/aa/{'aa' * 32}")
    (blobs / git_hash(CONFIG)).write_bytes(CONFIG)
    (snapshot / WEIGHTS).symlink_to(f"../../blobs/{SHA}")
    (snapshot / "config.json").symlink_to(f"../../blobs/{git_hash(CONFIG)}")
    return tmp_path / "hub"


def checksum_of(path: str) -> Checksum | None:
    return checksums_of([path])[path]


def sha256sum(folder: Path, *arguments: str) -> str:
    return subprocess.run(["sha256sum", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


# -- the cache of the Hub --------------------------------------------------------------------------------------------


def test_the_cache_names_blobs_by_their_digests(cache: Path) -> None:
    config, weights = verify_checkpoint("org/model", cache_dir=cache)
    assert (config.algorithm, config.expected, config.is_proven) == ("git's sha1", git_hash(CONFIG), True)
    assert (weights.algorithm, weights.expected, weights.digest) == ("sha256", SHA, SHA)
    assert (weights.nbytes, weights.is_proven, weights.origin) == (
        len(DATA),
        True,
        "the Hub, whose cache names the file by it",
    )
    assert verify_checkpoint("org/model", revision=COMMIT, cache_dir=cache) == (config, weights)
    link = cache / "latest"
    link.symlink_to(cache / "models--org--model" / "snapshots" / COMMIT)
    assert all(check.is_proven for check in verify_checkpoint(link))


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_flipped_bit_in_the_cache_is_found(cache: Path, name: str) -> None:
    blob = (cache / "models--org--model" / "snapshots" / COMMIT / name).resolve()
    data = bytearray(blob.read_bytes())
    data[20] ^= 1
    blob.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"(?s)1 file\(s\) are not .*{name}: its .* is .*, expected .*the Hub"):
        verify_checkpoint("org/model", cache_dir=cache)


def test_what_is_not_in_the_cache_is_said_to_be(cache: Path) -> None:
    for arguments in ({"name": "org/other"}, {"name": "org/model", "revision": "v2"}, {"name": "a//b"}):
        with pytest.raises(CheckpointError, match="no such folder in /"):
            verify_checkpoint(**arguments, cache_dir=cache)


def test_links_in_a_circle_are_no_blob(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert checksum_of(str(tmp_path / "a")) is None


# -- downloads to a local folder -------------------------------------------------------------------------------------


def test_a_download_to_a_folder_is_compared_with_its_etags(folder: Path) -> None:
    write_download_metadata(folder, WEIGHTS, COMMIT, SHA)
    write_download_metadata(folder, "config.json", COMMIT, git_hash(CONFIG))
    assert [check.is_proven for check in verify_checkpoint(folder)] == [True, True]
    (folder / WEIGHTS).write_bytes(DATA[:-1] + b"\0")
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS}: its sha256 is .* \(from the Hub, noted in .*\.metadata\)"):
        verify_checkpoint(folder)


def test_a_download_of_a_subfolder_is_noted_above_it(folder: Path) -> None:
    (folder / "unet").mkdir()
    (folder / "unet" / WEIGHTS).write_bytes(DATA)
    write_download_metadata(folder, f"unet/{WEIGHTS}", COMMIT, SHA)
    (check,) = verify_checkpoint(folder, subfolder="unet")
    assert check.is_proven


@pytest.mark.parametrize("text", ["", COMMIT, f"{COMMIT}\nnot-a-digest\n1.0\n", f"{COMMIT}\n{'ab' * 16}\n1.0\n"])
def test_a_note_without_a_known_etag_tells_nothing(folder: Path, text: str) -> None:
    write_download_metadata(folder, WEIGHTS, COMMIT, SHA)
    (folder / ".cache" / "huggingface" / "download" / f"{WEIGHTS}.metadata").write_text(text)
    assert checksum_of(str(folder / WEIGHTS)) is None


# -- files of checksums ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["--binary"], ["--tag"]], ids=str)
@pytest.mark.parametrize("name", ["SHA256SUMS", f"{WEIGHTS}.sha256", "all.sha256"])
def test_what_sha256sum_writes_is_understood(folder: Path, arguments: list[str], name: str) -> None:
    text = sha256sum(folder, *arguments, "./" + WEIGHTS, "config.json")
    (folder / name).write_text(f"# a comment\n\n{text}")
    found = checksum_of(str(folder / WEIGHTS))
    assert found is not None
    assert (found.algorithm, found.digest, found.origin) == ("sha256", SHA, str(folder / name))
    assert [check.is_proven for check in verify_checkpoint(folder)] == [True, True]


def test_a_digest_alone_belongs_to_the_file_it_is_named_after(folder: Path) -> None:
    (folder / f"{WEIGHTS}.sha256").write_text(SHA.upper() + "\n")
    assert checksum_of(str(folder / "config.json")) is None
    (check,) = verify_checkpoint(folder)
    assert check.is_proven


@pytest.mark.parametrize("line", [f"{SHA}  sub/{WEIGHTS}", f"{SHA}  ../{WEIGHTS}", f"{SHA[:-1]}  {WEIGHTS}", "\xff"])
def test_lines_about_something_else_tell_nothing(folder: Path, line: str) -> None:
    (folder / "SHA256SUMS").write_text(f"{line}\n", encoding="latin-1")
    (check,) = verify_checkpoint(folder)
    assert (check.expected, check.origin, check.digest, check.is_proven) == (None, None, SHA, False)


def test_two_digests_for_a_file_are_refused(folder: Path) -> None:
    (folder / "SHA256SUMS").write_text(f"{SHA}  {WEIGHTS}\n")
    (folder / "old.sha256").write_text(f"{OTHER}  {WEIGHTS}\n")
    with pytest.raises(CheckpointError, match=r"SHA256SUMS, old\.sha256 hold\(s\) 2 different SHA-256"):
        verify_checkpoint(folder)


def test_a_file_of_checksums_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "MAX_NBYTES", 10)
    (folder / "SHA256SUMS").write_text(f"{SHA}  {WEIGHTS}\n")
    with pytest.raises(CheckpointError, match="SHA256SUMS: has 84 bytes, expected at most 10"):
        verify_checkpoint(folder)


def test_all_files_that_differ_are_named(folder: Path) -> None:
    for number in range(12):
        (folder / f"model-{number:02}.safetensors").write_bytes(DATA)
    lines = [f"{OTHER}  {path.name}\n" for path in folder.glob("model-*")]
    (folder / "SHA256SUMS").write_text("".join(lines))
    with pytest.raises(CheckpointError) as caught:
        verify_checkpoint(folder)
    message = str(caught.value)
    assert message.startswith("12 file(s) are not what they should be")
    assert message.count(f"its sha256 is {SHA}, expected {OTHER}") == 10 and message.endswith("\n...")


# -- what is no checkpoint -------------------------------------------------------------------------------------------


def test_files_below_that_an_index_names_are_compared_too(folder: Path) -> None:
    below = folder / "part" / "second.safetensors"
    index = {"metadata": {}, "weight_map": {"a": WEIGHTS, "b": "part/second.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"1 of 2 files are missing that it names: part/second.safetensors"):
        verify_checkpoint(folder)
    below.parent.mkdir()
    below.write_bytes(DATA)
    (below.parent / "SHA256SUMS").write_text(sha256sum(below.parent, below.name))
    assert [check.is_proven for check in verify_checkpoint(folder) if check.path == str(below)] == [True]
    below.write_bytes(DATA[::-1])
    with pytest.raises(CheckpointError, match=r"second.safetensors: its sha256 is"):
        verify_checkpoint(folder)


def test_weights_of_any_name_are_meant_and_a_folder_without_is_refused(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "last.pth")
    assert [check.digest for check in verify_checkpoint(folder)] == [SHA]
    (folder / "last.pth").rename(folder / "training_args.bin")
    with pytest.raises(CheckpointError, match="holds no weights"):
        verify_checkpoint(folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        verify_checkpoint(folder, subfolder="absent")


# -- hashes of whole sources, against hashlib, sha256sum and git -------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 5])
def test_hashes_are_those_of_the_tools(nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(random.Random(nbytes).randbytes(nbytes))
    source = LocalFile(str(path))
    assert hash_source(source, SHA256) == hashlib.sha256(path.read_bytes()).hexdigest()
    of_git = subprocess.run(["git", "hash-object", str(path)], capture_output=True, text=True, check=True)
    assert hash_source(source, GIT) == of_git.stdout.strip()
    source.close()


def test_a_file_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10))

    class Changing(LocalFile):
        def read_into(self, offset: int, memory: memoryview) -> None:
            super().read_into(offset, memory)
            os.utime(path, ns=(1, 1))

    source = Changing(str(path))
    with pytest.raises(CheckpointError, match="was replaced or written to while it was hashed"):
        hash_source(source, SHA256)
    source.close()
