"""Finds the files of checkpoints in remote stores, and has `files/stand_ins.py` lay out a local folder for them."""

from __future__ import annotations

import html
import os
import posixpath
import re
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from lowmem_load.errors import CheckpointError
from lowmem_load.files import object_store
from lowmem_load.files.object_store import RemoteObject
from lowmem_load.files.remote_file import Check, map_in_threads
from lowmem_load.files.stand_ins import MAX_FILES, Listing, is_plain_path, lay_out, read_front, secrets
from lowmem_load.phases import no_callback
from lowmem_load.text import is_http, plain_url, without_secrets


def folder_of_url(url: str, *, subfolder: str = "", check: Check = no_callback) -> str:
    """Return the folder that stands for a URL. `check` is called while this waits, and may raise to end it."""
    _check_url(url)
    origin = plain_url(url).rstrip("/")
    secrets[origin] = url if plain_url(url) != url else None
    files: Listing
    if is_http(url):
        names = dict.fromkeys(_listed(url, subfolder, check))
        found = map_in_threads(lambda name: object_store.find(url, name), names, check)
        files = {name: item for name, item in zip(names, found, strict=True) if item is not None}
    else:
        (files,) = map_in_threads(lambda folder: object_store.list_files(url, folder), [subfolder], check)
    if not files:
        raise CheckpointError(f"{origin}: no files are there; name the folder that has config.json")
    return lay_out(origin, files, lambda _, item: read_front(item, item.nbytes), check)


def _listed(url: str, subfolder: str, check: Check) -> list[str]:
    """Return the files of a folder on an HTTP server, and of one subfolder of it, by SHA256SUMS or the page there."""

    def read(path: str) -> bytes | None:
        (content,) = map_in_threads(lambda path: object_store.read_list(url, path), [path], check)
        return content

    names: list[str] = []
    for folder in dict.fromkeys(("", subfolder.strip("/"))):
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
