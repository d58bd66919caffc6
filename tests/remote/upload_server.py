"""A `RangeServer` that also takes files as S3 does: in one request, or as multipart uploads, which it counts."""

import contextlib
import hashlib
import os
import re
import threading
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import unescape

from tests.remote.behaviour import Behaviour
from tests.remote.listing import etag
from tests.remote.range_server import Answer, Folders, RangeServer, Request


class UploadServer(RangeServer):
    """Keeps the files in its folders, and what is not completed in memory.

    `uploads` has the parts of uploads that are neither completed nor aborted, by their ids, `completed` the numbers of
    bytes of the parts of those that were completed, and `changes` what was done to files, in order.
    """

    def __init__(self, folders: Folders, **behaviour: Any) -> None:
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.completed: dict[str, list[int]] = {}
        self.changes: list[str] = []
        self._files = threading.Lock()
        self._begun = 0
        super().__init__(folders, **behaviour)

    def answer_to(self, request: Request, behaviour: Behaviour) -> Answer:
        """What a request gets that neither fails nor is refused."""
        if request.method in ("GET", "HEAD"):
            return super().answer_to(request, behaviour)
        query = {name: values[-1] for name, values in parse_qs(request.query, keep_blank_values=True).items()}
        if unquote(request.path).strip("/").partition("/")[0] not in self._folders:
            return Answer(404, {}, b"<Error><Code>NoSuchBucket</Code></Error>")
        with self._files:
            return self._change(request, query)

    def _change(self, request: Request, query: dict[str, str]) -> Answer:
        if request.method == "POST" and "delete" in query:
            keys = re.findall(r"<Key>(.*?)</Key>", request.body.decode())
            for key in keys:
                self._delete(f"{request.path.rstrip('/')}/{unescape(key)}")
            found = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return self._xml("DeleteResult", found)
        if request.method == "POST" and "uploads" in query:
            self._begun += 1
            self.uploads[f"upload-{self._begun}"] = {}
            return self._xml("InitiateMultipartUploadResult", f"<UploadId>upload-{self._begun}</UploadId>")
        upload = query.get("uploadId")
        if upload is not None and upload not in self.uploads:
            return Answer(404, {}, b"<Error><Code>NoSuchUpload</Code></Error>")
        if request.method == "PUT" and upload is not None:
            self.uploads[upload][int(query["partNumber"])] = request.body
            return Answer(200, {"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})
        if request.method == "PUT":
            return Answer(200, {"ETag": self._put(request.path, request.body)})
        if request.method == "POST" and upload is not None:
            numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", request.body.decode())]
            parts = self.uploads.pop(upload)
            assert numbers == sorted(parts)
            self.completed[unquote(request.path)] = [len(parts[number]) for number in numbers]
            tag = self._put(request.path, b"".join(parts[number] for number in numbers))
            return self._xml("CompleteMultipartUploadResult", f"<ETag>{tag}</ETag>")
        if upload is not None:
            del self.uploads[upload]
        else:
            self._delete(request.path)
        return Answer(204)

    def _put(self, path: str, content: bytes) -> str:
        target = self._target(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f"{target.name}.new")
        new.write_bytes(content)
        os.replace(new, target)
        self.changes.append(f"put {target.name}")
        return etag(target.stat())

    def _delete(self, path: str) -> None:
        target = self._target(path)
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
            self.changes.append(f"delete {target.name}")

    def _target(self, path: str) -> Path:
        bucket, _, key = unquote(path).strip("/").partition("/")
        return self._folders[bucket] / key

    def _xml(self, name: str, content: str) -> Answer:
        return Answer(200, {"Content-Type": "application/xml"}, f"<{name}>{content}</{name}>".encode())
