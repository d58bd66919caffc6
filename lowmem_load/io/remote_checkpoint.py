"""Checkpoints in remote stores: a local folder stands for each. It has the small files, and empty files for weights.

Whoever opens an empty one by `open_file` gets a `RemoteFile`. The name of the folder is a digest of the names and
versions of the files, so the ranks of a node share it, and the first one fetches the small files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import posixpath
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import build_hf_headers

from lowmem_load.errors import CheckpointError
from lowmem_load.fingerprint import fingerprint
from lowmem_load.io import object_store
from lowmem_load.io.http_object import HttpObject, refuse_status, requested, without_secrets
from lowmem_load.io.remote_file import HEAD_BYTES, RemoteFile, RemoteObject, retried
from lowmem_load.io.source import read_bytes
from lowmem_load.io.stand_ins import HEADS, head_of, note_folder, plain_url

MAX_SMALL_NBYTES = 64 << 20
"""Most bytes of a file that is fetched whole, such as an index."""

MAX_NAME_NBYTES = 255
"""Most bytes of a file name, as on most file systems."""

SAFETENSORS, TORCH = ("model.safetensors", "adapter_model.safetensors"), ("pytorch_model.bin", "adapter_model.bin")

ON_HTTP = (
    *("config.json", "generation_config.json", "adapter_config.json", "quantize_config.json", "SHA256SUMS"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json", *SAFETENSORS, *TORCH),
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("chat_template.jinja", "chat_template.json", "processor_config.json", "preprocessor_config.json"),
    "video_preprocessor_config.json",
)
"""Files that are looked for on an HTTP server, which has no list of its files."""

LOCK_LOOK_S = 0.05
"""Between two tries to take a lock that another process has."""

NUM_THREADS = 16
"""Small requests at a time."""

MAX_FILES = 4096
"""Most files of a checkpoint: twenty times as many as the largest published ones have."""

MAX_SMALL_NBYTES_IN_ALL = 256 << 20
"""Most bytes of all files that are fetched whole."""

SMALL = (".json", ".py", ".sha256", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe", "SHA256SUMS")
"""Ends of names of files that are fetched whole: configurations, tokenizers, code, checksums."""

Check = Callable[[], object]
T = TypeVar("T")
Item = TypeVar("Item")

Listing = Mapping[str, RemoteObject]
"""Files by their path in the checkpoint: "config.json", "subfolder/config.json"."""


def folder_of_url(url: str, *, subfolder: str = "", check: Check = int) -> str:
    """Return the folder that stands for a URL. `check` is called while this waits, and may raise to end it.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        ConfigError: a package is not installed.
    """
    _check_url(url)
    origin = plain_url(url).rstrip("/")
    if urlsplit(url).scheme in ("http", "https"):
        listing: Listing = _listed_on_http(url, subfolder, check)
    else:
        listing = retried(lambda: object_store.listed(url, subfolder), f"{origin}: cannot be listed", check=check)
    if not listing:
        raise CheckpointError(f"{origin}: no files are there; name the folder that holds config.json")
    return _laid_out(origin, listing, lambda file, check: _content(listing[file], check), check)


def _check_url(url: str) -> None:
    try:
        has_host = bool(urlsplit(url).hostname) and (urlsplit(url).port or True)
    except ValueError:
        has_host = False
    if not has_host:  # the text is not quoted: what looks like a path may be the rest of a password
        raise CheckpointError(
            f"{url.partition(':')[0]}://...: the URL names no host or bucket, or a port that is no number; in a "
            "password, write / and @ as %2F and %40"
        )


def folder_of_model(
    name: str,
    *,
    subfolder: str = "",
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    check: Check = int,
) -> tuple[str, str]:
    """Return the folder that stands for a model on the Hub, and its commit. Small files go through the Hub's cache.

    Raises:
        CheckpointError: there is no such model, or the Hub cannot be reached.
    """
    info = _model_info(name, revision, token)
    commit = str(info.sha)
    listing: dict[str, RemoteObject] = {}
    for sibling in info.siblings:
        file, sha256 = str(sibling.rfilename), sibling.lfs.sha256 if sibling.lfs is not None else None
        if posixpath.dirname(file) in ("", subfolder.strip("/")):
            url = huggingface_hub.hf_hub_url(name, file, revision=commit)
            version = f"{commit} {sha256 or sibling.blob_id}"
            listing[file] = HttpObject(
                url, int(sibling.size or 0), version, lambda: build_hf_headers(token=token), of_hub=True, sha256=sha256
            )

    def fetch(file: str, check: Check) -> bytes:
        check()
        try:
            return Path(
                huggingface_hub.hf_hub_download(name, file, revision=commit, token=token, cache_dir=cache_dir)
            ).read_bytes()
        except Exception as error:  # noqa: BLE001  of httpx or requests, or of the cache on disk
            raise CheckpointError(
                f"{name}: {file} cannot be fetched from the Hub: {without_secrets(str(error))}"
            ) from None  # the error itself quotes signed URLs

    return _laid_out(name, listing, fetch, check, tokenizers=False), commit


def _is_small(file: str, item: RemoteObject, *, tokenizers: bool) -> bool:
    name = file.rpartition("/")[2]
    is_wanted = tokenizers or not name.startswith(("tokenizer", "vocab", "merges"))
    return name.endswith(SMALL) and item.nbytes <= MAX_SMALL_NBYTES and is_wanted


def _model_info(name: str, revision: str | None, token: str | bool | None) -> Any:
    try:
        return huggingface_hub.HfApi(token=token).model_info(name, revision=revision, files_metadata=True)
    except HFValidationError as error:
        raise CheckpointError(f"{name}: neither a folder nor a Hub id: {error}") from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{name}: no such folder, and the Hub says: {error}") from error
    except Exception as error:  # of httpx or requests, depending on huggingface_hub
        raise CheckpointError(
            f"{name}: no such folder, and the Hub at {huggingface_hub.constants.ENDPOINT} cannot be reached: {error}"
        ) from error


# -- listings ----------------------------------------------------------------------------------------------------------


def _listed_on_http(url: str, subfolder: str, check: Check) -> Listing:
    parts = urlsplit(url)
    base = parts._replace(path=parts.path.rstrip("/") + "/").geturl()
    prefixes = list(dict.fromkeys(("", f"{subfolder.strip('/')}/" if subfolder.strip("/") else "")))
    found = _looked_up(base, [f"{prefix}{file}" for prefix in prefixes for file in ON_HTTP], check)
    more: list[str] = []
    for prefix in prefixes:
        for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            if (item := found.get(prefix + index)) is not None:
                more += [prefix + file for file in _shards(item, check)]
        if (item := found.get(f"{prefix}config.json")) is not None:
            more += [prefix + file for file in _code(item, check)]
    code = _looked_up(base, more, check)
    while code:  # code may import more of it
        found |= code
        beside = {
            posixpath.join(posixpath.dirname(file), name) for file in code for name in _imported(code[file], check)
        }
        code = _looked_up(base, beside - found.keys(), check)
    return found


def _imported(code: RemoteObject, check: Check) -> set[str]:
    """Return the files beside it that a file of code imports."""
    if not code.name.endswith(".py"):
        return set()
    modules = re.findall(r"^\s*from \.(\w+)[\w.]* import", _content(code, check).decode(errors="replace"), re.MULTILINE)
    return {f"{module}.py" for module in modules}


def _looked_up(base: str, files: Iterable[str], check: Check) -> dict[str, RemoteObject]:
    def look_up(file: str, check: Check) -> RemoteObject | None:
        return retried(lambda: _head(base, file), f"{plain_url(base)}{file}: cannot be found", check=check)

    files = list(dict.fromkeys(files))
    items = _in_threads(look_up, files, check)
    return {file: item for file, item in zip(files, items, strict=True) if item is not None}


def _head(base: str, file: str) -> RemoteObject | None:
    parts = urlsplit(base)
    url = parts._replace(path=parts.path + quote(file)).geturl()
    with requested("HEAD", url, {}, dict, first=url) as (_, answer):
        if answer.status in (404, 410) or (answer.status == 403 and file != "config.json"):
            return None  # S3 says 403 for what is not there, to who may not list
        refuse_status(plain_url(url), answer)
        sent, length = answer.headers, str(answer.headers.get("Content-Length", ""))
        tag = str(sent.get("ETag", ""))
        version = tag if tag.startswith('"') else sent.get("Last-Modified")  # a weak tag is no condition
        if not version or not re.fullmatch(r"[0-9]{1,15}", length):
            raise CheckpointError(
                f"{plain_url(url)}: the server sends no {'Content-Length' if version else 'ETag and no Last-Modified'}"
                ", without which a file that is replaced goes unnoticed; use another server, or download the checkpoint"
            )
        return HttpObject(url, int(length), version)


def _shards(index: RemoteObject, check: Check) -> set[str]:
    """Return the names in an index that may be files beside it; `check_index` refuses the others."""
    content = _content(index, check)
    try:
        names = set(json.loads(content)["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return set()
    if len(names) > MAX_FILES:
        raise CheckpointError(f"{index.name}: names {len(names)} files, expected at most {MAX_FILES}")
    return {name for name in names if isinstance(name, str) and _is_plain(name)}


def _code(config: RemoteObject, check: Check) -> set[str]:
    """Return the files of code that a configuration names."""
    content = _content(config, check)
    try:
        modules = json.loads(content).get("auto_map", {}).values()
    except (ValueError, AttributeError, RecursionError):
        return set()
    found = {f"{each.partition('.')[0]}.py" for each in modules if isinstance(each, str) and "--" not in each}
    return {name for name in found if _is_plain(name)}


def _is_plain(name: str) -> bool:
    """Return whether this may be the name of a file: names are untrusted."""
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:  # half of a surrogate pair, from JSON
        return False
    is_name = name not in ("", ".", "..", HEADS) and nbytes <= MAX_NAME_NBYTES
    return is_name and not any(each in name for each in ("/", "\\", "\0", "?", "#"))


def _content(item: RemoteObject, check: Check) -> bytes:
    if item.nbytes > MAX_SMALL_NBYTES:
        raise CheckpointError(f"{item.name}: has {item.nbytes} bytes, expected at most {MAX_SMALL_NBYTES}")
    return _front(item, item.nbytes, check)


def _front(item: RemoteObject, nbytes: int, check: Check) -> bytes:
    file = RemoteFile(item)
    file.on_wait = check
    return read_bytes(file, 0, nbytes)


def _in_threads(act: Callable[[Item, Check], T], items: Iterable[Item], check: Check) -> list[T]:
    """Return what `act` makes of each item, called with a check that raises once one of them, or this thread, has."""
    ended = threading.Event()

    def look() -> None:
        if ended.is_set():
            raise CheckpointError("another request has failed")
        check()

    pool = ThreadPoolExecutor(NUM_THREADS, "lowmem_load-find")
    try:
        return list(pool.map(lambda item: act(item, look), items))
    finally:
        ended.set()
        pool.shutdown(wait=False, cancel_futures=True)


# -- the folder --------------------------------------------------------------------------------------------------------


def _laid_out(
    origin: str, listing: Listing, fetch: Callable[[str, Check], bytes], check: Check, *, tokenizers: bool = True
) -> str:
    """Return the folder for a listing, filled by this process or by another one of this user."""
    small = {file for file, item in listing.items() if _is_small(file, item, tokenizers=tokenizers)}
    small_nbytes = sum(listing[file].nbytes for file in small)
    if len(listing) > MAX_FILES or small_nbytes > MAX_SMALL_NBYTES_IN_ALL:
        raise CheckpointError(
            f"{origin}: has {len(listing)} files, and {small_nbytes} bytes in small ones; expected at most {MAX_FILES} "
            f"and {MAX_SMALL_NBYTES_IN_ALL}; name the folder of one checkpoint"
        )
    for file in listing:
        _check_file_name(origin, file)
    lines = [f"{file} {item.name} {item.nbytes} {item.version}" for file, item in sorted(listing.items())]
    base, last = _base(), origin.rpartition("/")[2]
    folder = os.path.join(base, fingerprint([origin, *lines]), last if _is_plain(last) else "model")
    with _locked(f"{os.path.dirname(folder)}.lock", check):
        if not all(_is_there(folder, file, listing[file] if file in small else None) for file in listing):
            shutil.rmtree(os.path.dirname(folder), ignore_errors=True)  # a cleaner of old files may have been at work
            _fill(folder, listing, small, fetch, check)
    note_folder(folder, origin, {os.path.join(folder, file): listing[file] for file in listing if file not in small})
    return folder


def _is_there(folder: str, file: str, small: RemoteObject | None) -> bool:
    path = os.path.join(folder, file)
    return os.path.isfile(path) and os.path.getsize(path) == (0 if small is None else small.nbytes)


def _fill(
    folder: str, listing: Listing, small: Container[str], fetch: Callable[[str, Check], bytes], check: Check
) -> None:
    target, last = os.path.split(folder)
    base = os.path.dirname(target)
    made = tempfile.mkdtemp(dir=base)

    def fill(file: str, check: Check) -> None:
        path = os.path.join(made, last, file)
        Path(path).write_bytes(fetch(file, check) if file in small else b"")
        if file.endswith(".safetensors"):
            Path(head_of(path)).write_bytes(_front(listing[file], HEAD_BYTES, check))

    try:
        for file in listing:
            os.makedirs(os.path.dirname(head_of(os.path.join(made, last, file))), exist_ok=True)
        _in_threads(fill, listing, check)
        os.rename(made, target)  # there at once and whole, or not at all
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise CheckpointError(f"{base}: small files of a checkpoint cannot be written there: {error}") from error
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _check_file_name(origin: str, file: str) -> None:
    """Refuse a name that would leave the folder."""
    if not all(map(_is_plain, file.split("/"))):
        raise CheckpointError(f"{origin}: lists a file with the impossible name {file[:80]!r}")


def _base() -> str:
    """Return a folder of this user in the temporary one, which nobody else may write to."""
    base = os.path.join(tempfile.gettempdir(), f"lowmem_load-{os.getuid()}")
    os.makedirs(base, mode=0o700, exist_ok=True)
    found = os.lstat(base)
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CheckpointError(f"{base}: belongs to somebody else, or others may write to it; remove it")
    return base


@contextlib.contextmanager
def _locked(path: str, check: Check) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                check()
                time.sleep(LOCK_LOOK_S)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # also of copies in processes that were forked meanwhile
        os.close(descriptor)
