"""Azurite, Microsoft's own stand-in for Azure's blob service: a process of this machine while a block runs.

It is no dependency of the tests: npm installs it under `.cache/azurite` once. There is nothing like it for GCS:
fake-gcs-server ignores If-Match and knows none of the ways that obstore puts by, and gcp-storage-emulator knows no HEAD
of the XML API.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from unittest import mock
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "azurite"
PROGRAM = FOLDER / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
PACKAGE = "azurite@3.37.0"
CONTAINER = "bucket"
ROOT = f"az://{CONTAINER}"
START_S = 60
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, that is the same everywhere."""


@dataclass(frozen=True)
class Azurite:
    """Azurite as it runs."""

    endpoint: str
    """Where it listens, "http://127.0.0.1:1234/account"."""

    def put(self, path: Path, key: str) -> None:
        """Put a file into the container, in place of what was there."""
        import obstore
        from obstore.store import from_url

        config = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": self.endpoint}
        obstore.put(from_url(ROOT, config=config, client_options={"allow_http": True}), key, path)

    @contextlib.contextmanager
    def environment_set(self) -> Iterator[None]:
        """Inside, this process reads from the server."""
        environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_ALLOW_HTTP": "true",
        }
        with mock.patch.dict(os.environ, environment):
            yield


@contextlib.contextmanager
def azurite() -> Iterator[Azurite]:
    """Run it in memory, with one container, until the block ends; it checks signatures. Skips tests without npm."""
    if not PROGRAM.exists():
        if not shutil.which("npm"):
            pytest.skip("Azurite takes npm, which is not here")
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / "package.json").write_text('{"private": true}\n')
        options = ["--no-audit", "--no-fund", "--ignore-scripts", "--omit=optional"]
        subprocess.run(["npm", "install", *options, PACKAGE], cwd=FOLDER, stdin=subprocess.DEVNULL, check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    endpoint, began_s = f"http://127.0.0.1:{port}/{ACCOUNT}", time.monotonic()
    command = ["node", str(PROGRAM), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    command += ["--silent", "--skipApiVersionCheck", "--disableProductStyleUrl", "--disableTelemetry"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=FOLDER)
    try:
        while not _answers(f"{endpoint}?comp=list"):
            assert process.poll() is None and time.monotonic() - began_s < START_S, "Azurite does not answer"
            time.sleep(0.05)
        _make_container(endpoint)
        yield Azurite(endpoint)
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5):
            return True
    except HTTPError as error:
        error.close()
        return True
    except OSError:
        return False


def _make_container(endpoint: str) -> None:
    """Ask Azurite for the container, which obstore cannot, signed with the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    content_type = "application/octet-stream"
    signed = ["PUT", "", "", "", "", content_type, "", "", "", "", "", ""]
    signed += [f"{name}:{value}" for name, value in headers.items()]
    text = "\n".join([*signed, f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}", "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Type": content_type}
    asked = Request(f"{endpoint}/{CONTAINER}?restype=container", data=b"", method="PUT", headers=headers)
    with urlopen(asked, timeout=30):
        pass
