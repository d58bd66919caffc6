"""A stand-in for the Hub: serves a folder as a model, to the process that calls it, and notes what it is asked."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.remote.behaviour import Behaviour
from tests.remote.hub_front import COMMIT, HubServer
from tests.remote.range_server import Answer, Request


class NotingHub(HubServer):
    """Notes what it is asked: "HEAD config.json"."""

    def __init__(self, folder: Path, model: str) -> None:
        self.asked: list[str] = []
        super().__init__({model: folder}, None)

    def answer_to(self, request: Request, behaviour: Behaviour) -> Answer:
        self.asked.append(f"{request.method} {request.path.rpartition('/')[2]}")
        return super().answer_to(request, behaviour)


@contextlib.contextmanager
def hub(folder: Path, model: str, commit: str = COMMIT) -> Iterator[list[str]]:
    """Let huggingface_hub ask a server of this process that has one model, of one commit; yields what it is asked.

    The default cache of huggingface_hub is empty then, whatever this machine has in it.
    """
    server = NotingHub(folder, model)
    server.commit = commit
    try:
        with tempfile.TemporaryDirectory() as cache, pointed_at(server.url, cache):
            yield server.asked
    finally:
        server.close()


@contextlib.contextmanager
def pointed_at(endpoint: str, cache: str) -> Iterator[None]:
    """Let huggingface_hub of this process ask the server at `endpoint`, and keep in `cache` what it downloads."""
    from huggingface_hub import constants, file_download
    from transformers.utils import hub as of_transformers

    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    wanted: dict[str, Any] = {"ENDPOINT": endpoint, "HUGGINGFACE_CO_URL_TEMPLATE": template}
    wanted |= {"HF_HUB_OFFLINE": False, "_is_offline_mode": False, "HF_HUB_CACHE": cache}
    # Older releases have copies of the template, and of what says that the Hub is not asked.
    before = [
        (where, name, getattr(where, name))
        for where in (constants, file_download, of_transformers)
        for name in wanted
        if hasattr(where, name)
    ]
    for where, name, _ in before:
        setattr(where, name, wanted[name])
    try:
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
