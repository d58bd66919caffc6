"""Real servers of object stores, from packages: each a process on a free port of 127.0.0.1 while a block runs.

    with s3() as server:
        url = server.upload(folder, "models/one")  # s3://bucket/models/one
        with server.environment_set():
            load(url)

`s3` is moto, `azure` Azurite's blob service. `make test-stores` installs them into `.cache/stores`.

Moto believes all signatures. Emulators of GCS are of no use: fake-gcs-server ignores If-Match and knows none of the
ways that obstore puts by, and gcp-storage-emulator knows no HEAD of the XML API.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.error import HTTPError
from urllib.request import Request, urlopen

REPO = Path(__file__).resolve().parents[2]
INSTALLED = REPO / ".cache" / "stores"
MOTO, AZURITE = INSTALLED / "bin" / "python", INSTALLED / "node_modules/azurite/dist/src/blob/main.js"
BUCKET = "bucket"
START_S = 60
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, that is the same everywhere."""


@dataclass(frozen=True)
class Server:
    """A running object store."""

    endpoint: str
    """Where it listens, "http://127.0.0.1:1234"."""
    root: str
    """The URL of its bucket, "s3://bucket"."""
    environment: dict[str, str]
    """What a process has to have set that reads from it, credentials too."""
    config: dict[str, Any] = field(default_factory=dict)
    """The same as obstore's configuration."""

    def upload(self, folder: Path, prefix: str) -> str:
        """Put all files of a folder, and of those in it, under a prefix; returns its URL."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(path, f"{prefix}/{path.relative_to(folder).as_posix()}")
        return f"{self.root}/{prefix}"

    def put(self, path: Path, key: str) -> None:
        """Put a file, in place of what was there."""
        import obstore

        obstore.put(self._store(), key, path)

    def download(self, prefix: str, folder: Path) -> None:
        """Get all files under a prefix."""
        import obstore

        for meta in obstore.list(self._store(), prefix).collect():
            path = folder / Path(meta["path"]).relative_to(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(obstore.get(self._store(), meta["path"]).bytes())

    def _store(self) -> Any:
        from obstore.store import from_url

        return from_url(self.root, config=self.config, client_options={"allow_http": True})

    @contextlib.contextmanager
    def environment_set(self) -> Iterator[None]:
        """This process and those that it starts read from the server."""
        with mock.patch.dict(os.environ, self.environment):
            yield


@contextlib.contextmanager
def s3() -> Iterator[Server]:
    """Moto's S3, in memory, with one bucket; it believes all signatures."""
    with _started([str(MOTO), "-m", "moto.server", "-H", "127.0.0.1", "-p", "{port}"], "/moto-api/") as url:
        _ask("PUT", f"{url}/{BUCKET}")
        environment = {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
        environment |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        config = {"endpoint": url, "region": "us-east-1", "access_key_id": "test", "secret_access_key": "test"}
        yield Server(url, f"s3://{BUCKET}", environment, config)


@contextlib.contextmanager
def azure() -> Iterator[Server]:
    """Azurite's blob service, in memory, with one container; it checks signatures."""
    command = ["node", str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", "{port}", "--inMemoryPersistence"]
    command += ["--silent", "--skipApiVersionCheck", "--disableProductStyleUrl", "--disableTelemetry"]
    with _started(command, f"/{AZURE_ACCOUNT}?comp=list") as url:
        endpoint = f"{url}/{AZURE_ACCOUNT}"
        config = {"account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY, "endpoint": endpoint}
        environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
            "AZURE_ALLOW_HTTP": "true",
        }
        _make_container(endpoint)
        yield Server(url, f"az://{BUCKET}", environment, config)


def _make_container(endpoint: str) -> None:
    """Ask Azurite for the container, which obstore cannot, signed with the account's key."""
    import base64
    import hashlib
    import hmac
    from email.utils import formatdate

    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    content_type = "application/octet-stream"
    signed = ["PUT", "", "", "", "", content_type, "", "", "", "", "", ""]
    signed += [f"{name}:{value}" for name, value in headers.items()]
    text = "\n".join([*signed, f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}", "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256)).decode()
    headers |= {"Authorization": f"SharedKey {AZURE_ACCOUNT}:{signature}", "Content-Type": content_type}
    _ask("PUT", f"{endpoint}/{BUCKET}?restype=container", headers=headers)


@contextlib.contextmanager
def _started(command: Sequence[str], path: str) -> Iterator[str]:
    """Run a server until the block ends; yields its URL once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url, began = f"http://127.0.0.1:{port}", time.monotonic()
    dies_with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*dies_with_us, *(part.replace("{port}", str(port)) for part in command)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            )
        try:
            while not _answers(url + path):
                if process.poll() is not None or time.monotonic() - began > START_S:
                    raise RuntimeError(f"{' '.join(command)} does not answer:\n{log.read_text()[-2000:]}")
                time.sleep(0.05)
            yield url
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


def _ask(method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
    with urlopen(Request(url, data=body, method=method, headers={**(headers or {})}), timeout=30):
        pass
