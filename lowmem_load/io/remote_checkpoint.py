"""Checkpoints in remote stores: a local folder stands for each. It has the small files, and empty files for weights.

See `io/stand_ins.py`. The name of the folder ends with a digest of the names and versions of the files, so the ranks of
a node share it, and the first one fetches the small files.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import html
import json
import os
import posixpath
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urljoin, urlsplit

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from lowmem_load.errors import CheckpointError
from lowmem_load.io import http_files, object_store
from lowmem_load.io.http_files import hub_object, without_secrets
from lowmem_load.io.remote_file import HEAD_BYTES, Check, RemoteFile, RemoteObject, map_in_threads, retry
from lowmem_load.io.source import read_bytes
from lowmem_load.io.stand_ins import HEADS, MANIFEST, cache_folder, head_of, note_secret, plain_url
from lowmem_load.phases import no_callback
from lowmem_load.text import fingerprint

MAX_SMALL_NBYTES = 64 << 20
"""Most bytes of a file that is fetched whole, such as an index."""

MAX_NAME_NBYTES = 255
"""Most bytes of a file name, as on most file systems."""

WEIGHTS = (
    *("model.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "adapter_model.bin"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
)
"""Files of weights and indexes that transformers and diffusers look for; see `of_variant`."""

LOCK_LOOK_S = 0.05
"""Between two tries to take a lock that another process has."""

MAX_FILES = 4096
"""Most files of a checkpoint: twenty times as many as the largest published ones have."""

MAX_SMALL_NBYTES_IN_ALL = 256 << 20
"""Most bytes of all files that are fetched whole."""

SMALL = (".json", ".py", ".sha256", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe", "SHA256SUMS")
"""Ends of names of files that are fetched whole: configurations, tokenizers, code, checksums."""

Listing: TypeAlias = Mapping[str, RemoteObject]
"""Files by their path in the checkpoint: "config.json", "subfolder/config.json"."""

Fetch: TypeAlias = Callable[[str, RemoteObject, Check], bytes]
"""Returns the content of a small file, given its path in the checkpoint."""


def of_variant(file: str, variant: str | None) -> str:
    """Return the name that a file of weights, or an index, has for a `variant` of `from_pretrained`."""
    stem, _, end = file.rpartition(".")
    return f"{stem}.{variant}.{end}" if variant else file


def folder_of_url(url: str, *, subfolder: str = "", check: Check = no_callback) -> str:
    """Return the folder that stands for a URL. `check` is called while this waits, and may raise to end it.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        ConfigError: a package is not installed.
    """
    _check_url(url)
    origin = plain_url(url).rstrip("/")
    note_secret(origin, url if plain_url(url) != url else None)
    unsigned = False
    if _is_http(url):
        listing = _look_up(url, _listed(url, subfolder, check), check)
    else:
        listing = retry(lambda: object_store.list_files(url, subfolder), f"{origin}: cannot be listed", check=check)
        unsigned = any(item.entry["unsigned"] for item in listing.values())
    if not listing:
        raise CheckpointError(f"{origin}: no files are there; name the folder that holds config.json")
    files = _add_named_files(listing, lambda named: _look_up(url, named, check, unsigned=unsigned), _read_small, check)
    return _lay_out(origin, files, _read_small, check)


def _listed(url: str, subfolder: str, check: Check) -> list[str]:
    """Return the files of a folder on an HTTP server, and of one subfolder of it, by SHA256SUMS or the page there."""
    names: list[str] = []
    for folder in dict.fromkeys(("", subfolder.strip("/"))):

        def read(file: str, folder: str = folder) -> bytes | None:
            what = f"{plain_url(url).rstrip('/')}/{posixpath.join(folder, file)}: cannot be read"
            return retry(lambda: http_files.read_list(url, posixpath.join(folder, file)), what, check=check)

        sums = read("SHA256SUMS")
        if sums is not None:
            lines = [line.split(maxsplit=1) for line in sums.decode(errors="replace").splitlines()]
            found = ["SHA256SUMS", *(line[1].removeprefix("*").removeprefix("./") for line in lines if len(line) == 2)]
        else:
            page = read("") or b""
            links = re.findall(r"""href\s*=\s*["']?([^"'\s>]+)""", page.decode(errors="replace"), re.IGNORECASE)
            found = [name for link in links if (name := _name_of_link(url, folder, html.unescape(link)))]
        names += [posixpath.join(folder, name) for name in found if _is_plain_path(name)]
    if not names:
        raise CheckpointError(
            f"{plain_url(url).rstrip('/')}: the server does not list its files; run `sha256sum * > SHA256SUMS` in the "
            "folder there, or have the server list folders"
        )
    if len(names) > MAX_FILES:
        raise CheckpointError(f"{plain_url(url)}: lists {len(names)} files, expected at most {MAX_FILES}")
    return names


def _name_of_link(url: str, folder: str, link: str) -> str:
    """Return the name of the file in a folder to which the page of the folder links; "" for any other link."""
    page = posixpath.join(urlsplit(url).path, folder).rstrip("/") + "/"
    parts = urlsplit(urljoin(f"http://host{page}", link))
    path = unquote(parts.path)
    name = path.removeprefix(unquote(page)) if parts.netloc == "host" else ""
    return "" if "/" in name or parts.query else name


def _is_http(url: str) -> bool:
    return urlsplit(url).scheme in ("http", "https")


def _look_up(url: str, files: Iterable[str], check: Check, *, unsigned: bool = False) -> Listing:
    """Return those of some files that are there, by their path in the folder at a URL."""
    files = list(dict.fromkeys(files))
    if not files:
        return {}
    if _is_http(url):
        find = functools.partial(http_files.find, url)
    else:
        find = functools.partial(object_store.find, url, unsigned=unsigned)

    def find_again(file: str, check: Check) -> RemoteObject | None:
        what = f"{plain_url(url).rstrip('/')}/{file}: cannot be found"
        return retry(lambda: find(file), what, check=check)

    items = map_in_threads(find_again, files, check)
    return {file: item for file, item in zip(files, items, strict=True) if item is not None}


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
    check: Check = no_callback,
) -> tuple[str, str]:
    """Return the folder that stands for a model on the Hub, and its commit. Small files go through the Hub's cache.

    Raises:
        CheckpointError: there is no such model, or the Hub cannot be reached.
    """
    info = _model_info(name, revision, token)
    commit = str(info.sha)
    note_secret(name, token if isinstance(token, str) else None)
    listing: dict[str, RemoteObject] = {}
    deeper: dict[str, RemoteObject] = {}  # files of weights and indexes in other folders
    for sibling in info.siblings:
        file = str(sibling.rfilename)
        is_listed = posixpath.dirname(file) in ("", subfolder.strip("/"))
        if is_listed or file.endswith((".safetensors", ".bin", ".index.json")):
            url = huggingface_hub.hf_hub_url(name, file, revision=commit)
            version = f"{commit} {sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id}"
            (listing if is_listed else deeper)[file] = hub_object(url, int(sibling.size or 0), version, token)

    def fetch(file: str, _: RemoteObject, check: Check) -> bytes:
        check()
        try:
            return Path(
                huggingface_hub.hf_hub_download(name, file, revision=commit, token=token, cache_dir=cache_dir)
            ).read_bytes()
        except Exception as error:  # noqa: BLE001  of httpx or requests, or of the cache on disk
            raise CheckpointError(
                f"{name}: {file} cannot be fetched from the Hub: {without_secrets(str(error))}"
            ) from None  # the error itself quotes signed URLs

    files: Listing = listing
    if deeper:
        files = _add_named_files(
            listing, lambda named: {file: deeper[file] for file in named if file in deeper}, fetch, check
        )
    return _lay_out(name, files, fetch, check, tokenizers=False), commit


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


# -- files that others name --------------------------------------------------------------------------------------------


def _add_named_files(
    listing: Listing, look_up: Callable[[Iterable[str]], Listing], fetch: Fetch, check: Check
) -> Listing:
    """Return the files with those that indexes and configurations name, and code that such code imports."""
    files, latest = dict(listing), {file: listing[file] for file in listing if not file.endswith(".py")}
    while latest:
        naming = [(file, item) for file, item in latest.items() if _names_others(file)]
        contents = map_in_threads(lambda named, check: fetch(*named, check), naming, check)
        names = {
            posixpath.join(posixpath.dirname(file), name)
            for (file, item), content in zip(naming, contents, strict=True)
            for name in _names_in(item.name, content)
        }
        latest = dict(look_up(sorted(names - files.keys())))
        files |= latest
    return files


def _names_others(file: str) -> bool:
    return re.search(r"(\A|/)config\.json\Z|\.index(\.[^/]+)?\.json\Z|\.py\Z", file) is not None


def _names_in(url: str, content: bytes) -> set[str]:
    """Return the paths beside a file that it names. Its content is untrusted; its readers say what is wrong."""
    if url.endswith(".py"):
        pattern = r"^\s*from \.(\w+)[\w.]* import"
        return {f"{module}.py" for module in re.findall(pattern, content.decode(errors="replace"), re.MULTILINE)}
    try:
        values = json.loads(content)
        if posixpath.basename(url) == "config.json":
            code = [name for name in values.get("auto_map", {}).values() if isinstance(name, str) and "--" not in name]
            names = {values.get("transformers_weights"), *(f"{name.partition('.')[0]}.py" for name in code)}
        else:
            names = set(values["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return set()
    if len(names) > MAX_FILES:
        raise CheckpointError(f"{url}: names {len(names)} files, expected at most {MAX_FILES}")
    return {name for name in names if isinstance(name, str) and _is_plain_path(name)}


def _is_plain_path(path: str) -> bool:
    """Return whether this may be the path of a file in a checkpoint: it leads neither out nor into `HEADS`."""
    return all(map(_is_plain, path.split("/")))


def _is_plain(name: str) -> bool:
    """Return whether this may be the name of a file: names are untrusted."""
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:  # half of a surrogate pair, from JSON
        return False
    is_name = name not in ("", ".", "..", HEADS) and nbytes <= MAX_NAME_NBYTES
    return is_name and not any(character in name for character in ("/", "\\", "\0", "?", "#"))


def _read_small(_: str, item: RemoteObject, check: Check) -> bytes:
    if item.nbytes > MAX_SMALL_NBYTES:
        raise CheckpointError(f"{item.name}: has {item.nbytes} bytes, expected at most {MAX_SMALL_NBYTES}")
    return _read_front(item, item.nbytes, check)


def _read_front(item: RemoteObject, nbytes: int, check: Check) -> bytes:
    file = RemoteFile(item)
    file.on_wait = check
    return read_bytes(file, 0, nbytes)


# -- the folder --------------------------------------------------------------------------------------------------------


def _lay_out(origin: str, listing: Listing, fetch: Fetch, check: Check, *, tokenizers: bool = True) -> str:
    """Return the folder for a listing, filled by this process or by another one of this user."""
    small = {file for file, item in listing.items() if _is_small(file, item, tokenizers=tokenizers)}
    small_nbytes = sum(listing[file].nbytes for file in small)
    if len(listing) > MAX_FILES or small_nbytes > MAX_SMALL_NBYTES_IN_ALL:
        raise CheckpointError(
            f"{origin}: has {len(listing)} files, and {small_nbytes} bytes in small ones; expected at most {MAX_FILES} "
            f"and {MAX_SMALL_NBYTES_IN_ALL}; name the folder of one checkpoint"
        )
    for file in listing:
        if not _is_plain_path(file):  # it would leave the folder
            raise CheckpointError(f"{origin}: lists a file with the impossible name {file[:80]!r}")
    lines = [f"{file} {item.name} {item.nbytes} {item.version}" for file, item in sorted(listing.items())]
    base, last = _own_folder(), origin.rpartition("/")[2]
    readable = re.sub(r"[^\w.-]+", "-", origin, flags=re.ASCII).strip("-.")[-100:]
    place = os.path.join(base, f"{readable}-{fingerprint([origin, *lines])}")
    folder = os.path.join(place, last if _is_plain(last) else "model")
    entries = {file: item.entry for file, item in listing.items() if file not in small}
    manifest = json.dumps({"origin": origin, "files": entries}, indent=1)
    with _locked(f"{place}.lock", check):
        is_whole = all(_is_there(folder, file, listing[file] if file in small else None) for file in listing)
        if not is_whole or not os.path.isfile(os.path.join(place, MANIFEST)):
            _remove(place)  # a cleaner of old files may have been at work
            _fill_folder(folder, listing, small, fetch, check, manifest)
    return folder


def _remove(folder: str) -> None:
    """Delete a folder under another name: threads that still write into it find it gone."""
    with contextlib.suppress(OSError):
        gone = f"{folder}.gone"
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _is_there(folder: str, file: str, small: RemoteObject | None) -> bool:
    path = os.path.join(folder, file)
    return os.path.isfile(path) and os.path.getsize(path) == (0 if small is None else small.nbytes)


def _fill_folder(
    folder: str, listing: Listing, small: Container[str], fetch: Fetch, check: Check, manifest: str
) -> None:
    target, last = os.path.split(folder)
    base = os.path.dirname(target)
    made = tempfile.mkdtemp(dir=base)

    def fill(file: str, check: Check) -> None:
        path = os.path.join(made, last, file)
        Path(path).write_bytes(fetch(file, listing[file], check) if file in small else b"")
        if file.endswith(".safetensors"):
            Path(head_of(path)).write_bytes(_read_front(listing[file], HEAD_BYTES, check))

    try:
        for file in listing:
            os.makedirs(os.path.dirname(head_of(os.path.join(made, last, file))), exist_ok=True)
        map_in_threads(fill, listing, check)
        Path(made, MANIFEST).write_text(manifest, encoding="utf-8")
        os.rename(made, target)  # there at once and whole, or not at all
    except OSError as error:
        _remove(made)
        raise CheckpointError(f"{base}: small files of a checkpoint cannot be written there: {error}") from error
    except BaseException:
        _remove(made)
        raise


def _own_folder() -> str:
    """Return a folder of this user in the temporary one, which nobody else may write to."""
    base = cache_folder()
    os.makedirs(base, mode=0o700, exist_ok=True)
    status = os.lstat(base)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
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
