"""The Hub as loads by byte ranges see it: it tells of a model, and sends those who want weights to a signed host."""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from tests.remote.behaviour import Behaviour
from tests.remote.range_server import Answer, RangeServer, Request, file_answer, range_server

COMMIT = "c" * 40
LFS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""What the files end with that are not in git but in its large-file store."""


class HubServer(RangeServer):
    """Answers for models; `hub_front` makes one with its second host."""

    def __init__(self, repositories: Mapping[str, Path], files: RangeServer | None, **behaviour: Any) -> None:
        self.commit = COMMIT
        """What "main" is; set it to have it move on. Other revisions than it and "main" are not found."""
        self.files = files
        self._hashes: dict[tuple[Path, int, int], tuple[str, str]] = {}
        super().__init__(repositories, **behaviour)

    @property
    def environment(self) -> dict[str, str]:
        """What processes need before they import huggingface_hub, to ask this Hub. This one: tests.hub.pointed_at."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def answer_to(self, request: Request, behaviour: Behaviour) -> Answer:
        """What a request gets that neither fails nor is refused."""
        path = unquote(request.path)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        model, revision = (api[1], api[3]) if api else (file[1], file[2]) if file else ("", "")
        if model not in self._folders:
            return self._missing("RepoNotFound")
        if revision not in (None, "main", self.commit):
            return self._missing("RevisionNotFound")
        if api:
            content = self._tree(model) if api[2] == "tree" else self._info(model, request.query)
            return Answer(200, {"Content-Type": "application/json"}, json.dumps(content).encode())
        assert file is not None
        if (found := self.path_of(f"/{model}/{quote(file[3])}")) is None:
            return self._missing("EntryNotFound")
        return self._resolve(found, model, file[3], request, behaviour)

    def _resolve(self, path: Path, model: str, name: str, request: Request, behaviour: Behaviour) -> Answer:
        of_hub = {"X-Repo-Commit": self.commit}
        if not name.endswith(LFS) or self.files is None:
            etag = f'"{self._hash(path)[1 if name.endswith(LFS) else 0]}"'
            answer = file_answer(path, request, behaviour, etag)
        else:
            where = self.files.signed(f"/{model}/{quote(name)}")
            of_hub |= {"X-Linked-Etag": f'"{self._hash(path)[1]}"', "X-Linked-Size": str(path.stat().st_size)}
            answer = Answer(302, {"Location": where, "ETag": of_hub["X-Linked-Etag"]})
        answer.headers.update(of_hub)
        return answer

    def _missing(self, code: str) -> Answer:
        return Answer(404, {"X-Error-Code": code, "X-Repo-Commit": self.commit}, b"{}")

    def _info(self, model: str, query: str) -> dict[str, Any]:
        with_metadata = "blobs" in parse_qs(query)
        siblings = []
        for name, path in self._of(model):
            sibling: dict[str, Any] = {"rfilename": name}
            if with_metadata:
                git, sha256 = self._hash(path)
                sibling |= {"size": path.stat().st_size, "blobId": git}
                if name.endswith(LFS):
                    sibling["lfs"] = {"size": path.stat().st_size, "sha256": sha256, "pointerSize": 134}
            siblings.append(sibling)
        facts = {"_id": "0", "id": model, "modelId": model, "sha": self.commit, "tags": [], "private": False}
        return {**facts, "siblings": siblings}

    def _tree(self, model: str) -> list[dict[str, Any]]:
        entries = []
        for name, path in self._of(model):
            git, sha256 = self._hash(path)
            entry: dict[str, Any] = {"type": "file", "path": name, "size": path.stat().st_size, "oid": git}
            if name.endswith(LFS):
                entry["lfs"] = {"oid": sha256, "size": path.stat().st_size, "pointerSize": 134}
            entries.append(entry)
        return entries

    def _of(self, model: str) -> list[tuple[str, Path]]:
        folder = self._folders[model]
        return [(path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file()]

    def _hash(self, path: Path) -> tuple[str, str]:
        """The SHA-1 that git has for a file, and the SHA-256 of its content; both are kept while it does not change."""
        status = path.stat()
        key = (path, status.st_size, status.st_mtime_ns)
        if key not in self._hashes:
            content = path.read_bytes()
            git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
            self._hashes[key] = git, hashlib.sha256(content).hexdigest()
        return self._hashes[key]


@contextlib.contextmanager
def hub_front(
    repositories: Mapping[str, Path], *, valid_s: float = 60, secret: str = "secret", **behaviour: Any
) -> Iterator[HubServer]:
    """A Hub whose large files come from a second host that refuses URLs which are not signed, or no longer good.

    `behaviour` is that of the Hub; that of the second host is set by `files.set`. Signatures begin with `secret`.
    """
    at_files = {"check_signature": True, "refuse_authorization": True, "secret": secret, "valid_s": valid_s}
    with (
        range_server(repositories, **at_files) as files,
        contextlib.closing(HubServer(repositories, files, **behaviour)) as server,
    ):
        yield server
