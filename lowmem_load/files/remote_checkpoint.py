"""Finds the files of checkpoints in remote stores, and has `files/stand_ins.py` lay out a local folder for them."""

from __future__ import annotations

import html
import os
import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from lowmem_load.errors import CheckpointError
from lowmem_load.files import object_store
from lowmem_load.files.object_store import RemoteObject
from lowmem_load.files.remote_file import Check, map_in_threads
from lowmem_load.files.stand_ins import MAX_FILES, is_plain_path, is_url, lay_out, read_front, secrets
from lowmem_load.phases import no_callback
from lowmem_load.text import is_http, plain_url, without_secrets


def folder_of_url(url: str, *, subfolder: str = "", check: Check = no_callback) -> str:
    """Return the folder that stands for a URL. `check` is called while this waits, and may raise to end it."""
    return lay_out(plain_url(url).rstrip("/"), _find(url, [subfolder], check), _fetch, check)


def folder_of_checkpoint(name: str, tag: str | None, subfolders: Sequence[str] = (), check: Check = no_callback) -> str:
    """Return the folder that stands for a training checkpoint at a URL; any other name as it is.

    It has these subfolders, and the one of a tag, with what is below. Without a tag, the file `latest` names it.
    """
    if not is_url(name):
        return name
    files, named_by = _find(name, subfolders, check), "tag"
    if tag is None and (latest := files.get("latest")):
        (content,) = map_in_threads(lambda item: read_front(item, min(4096, item.nbytes)), [latest], check)
        tag, named_by = content.decode(errors="replace").strip(), "latest"
    if tag is not None and is_plain_path(tag):
        files |= _find(name, [tag], check, below=True)
        if not any(file.startswith(f"{tag}/") for file in files):
            raise CheckpointError(f"{plain_url(name)}: has no checkpoint {tag!r}, which {named_by!r} names")
    return lay_out(plain_url(name).rstrip("/"), files, _fetch, check)


def _fetch(_: str, item: RemoteObject) -> bytes:
    return read_front(item, item.nbytes)


def _find(url: str, subfolders: Sequence[str], check: Check, *, below: bool = False) -> dict[str, RemoteObject]:
    """Return the files of a folder and of these subfolders. For `below`, see `list_files`."""
    _check_url(url)
    origin = plain_url(url).rstrip("/")
    secrets[origin] = url if plain_url(url) != url else None
    if is_http(url):
        names = dict.fromkeys(_listed(url, subfolders, check))
        found = map_in_threads(lambda name: object_store.find(url, name), names, check)
        files = {name: item for name, item in zip(names, found, strict=True) if item is not None}
    else:
        (files,) = map_in_threads(lambda each: object_store.list_files(url, *each, below=below), [subfolders], check)
    if not files:
        raise CheckpointError(f"{origin}: no files are there; name the folder of the model or of the checkpoint")
    return files


def _listed(url: str, subfolders: Sequence[str], check: Check) -> list[str]:
    """Return the files of a folder on an HTTP server, and of subfolders of it, by SHA256SUMS or the page there."""

    def read(path: str) -> bytes | None:
        (content,) = map_in_threads(lambda path: object_store.read_list(url, path), [path], check)
        return content

    names: list[str] = []
    for folder in dict.fromkeys(("", *(each.strip("/") for each in subfolders))):
        sums = read(posixpath.join(folder, "SHA256SUMS"))
        if sums is not None:
            lines = [line.split(maxsplit=1) for line in sums.decode(errors="replace").splitlines()]
            found = ["SHA256SUMS", *(line[1].removeprefix("*").removeprefix("./") for line in lines if len(line) == 2)]
        else:
            page = read(posixpath.join(folder, "")) or b""
            links = re.findall(r"""href\s*=\s*["']?([^"'\s>]+)""", page.decode(errors="replace"), re.IGNORECASE)
            found = [name for link in links if (name := _name_of_link(url, folder, html.unescape(link)))]
        names += [posixpath.join(folder, name) for name in found if is_plain_path(name)]
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
    try:
        parts = urlsplit(urljoin(f"http://host{page}", link))
    except ValueError:  # a host in brackets that is not an address
        return ""
    path = unquote(parts.path)
    name = path.removeprefix(unquote(page)) if parts.netloc == "host" else ""
    return "" if "/" in name or parts.query else name


def _check_url(url: str) -> None:
    try:
        has_host = bool(urlsplit(url).hostname) and (urlsplit(url).port or True)
    except ValueError:
        has_host = False
    if not has_host:  # the text is not quoted: what looks like a path may be the rest of a password
        raise CheckpointError(
            f"{url.partition(':')[0]}://...: the URL does not name a host or bucket, or its port is not a number; in "
            "a password, write / and @ as %2F and %40"
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
    """Return the folder that stands for a model on the Hub, and its commit. Small files go through the Hub's cache."""
    try:
        info = huggingface_hub.HfApi(token=token).model_info(name, revision=revision, files_metadata=True)
    except HFValidationError as error:
        raise CheckpointError(f"{name}: neither a folder nor a Hub id: {error}") from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{name}: no such folder, and the Hub says: {without_secrets(str(error))}") from None
    except Exception as error:  # noqa: BLE001  of httpx or requests, depending on huggingface_hub
        raise CheckpointError(
            f"{name}: no such folder, and the Hub at {plain_url(huggingface_hub.constants.ENDPOINT)} cannot be "
            f"reached: {without_secrets(str(error))}"
        ) from None  # the errors themselves quote URLs with logins
    commit = str(info.sha)
    secrets[name] = token if isinstance(token, str) else None
    files: dict[str, RemoteObject] = {}
    for sibling in info.siblings:
        file = str(sibling.rfilename)
        if posixpath.dirname(file) in ("", subfolder.strip("/")):
            url = plain_url(huggingface_hub.hf_hub_url(name, file, revision=commit))  # HF_ENDPOINT may have a login
            version = f"{commit} {sibling.lfs.sha256 if sibling.lfs is not None else sibling.blob_id}"
            files[file] = RemoteObject(url, "", int(sibling.size or 0), version, on_hub=True, secret=token)

    def fetch(file: str, _: RemoteObject) -> bytes:
        try:
            return Path(
                huggingface_hub.hf_hub_download(name, file, revision=commit, token=token, cache_dir=cache_dir)
            ).read_bytes()
        except Exception as error:  # noqa: BLE001  of httpx or requests, or of the cache on disk
            raise CheckpointError(
                f"{name}: {file} cannot be fetched from the Hub: {without_secrets(str(error))}"
            ) from None  # the error itself quotes signed URLs

    return lay_out(name, files, fetch, check, tokenizers=False), commit
