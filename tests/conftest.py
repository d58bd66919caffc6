"""Environment first: torch, DeepSpeed and transformers read it on import."""

from tests.ranks import set_environment

set_environment()

import json  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402

pytest.register_assert_rewrite("tests.kits", "tests.multimodal", "tests.parity")  # their asserts fail in tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of modules that start ranks, for `make test-fast` to leave out.

    They come first: two processes that take a file at a time then end together, with the short files.
    """
    for item in items:
        if hasattr(getattr(item, "module", None), "run_ranks"):
            item.add_marker("ranks")
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that tests/builders.py puts its checkpoints in: each is made once per session."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of the real MiniLM weights (BERT, float32, one safetensors file of 91 MB)."""
    from tests.builders import minilm_path

    return minilm_path()


@pytest.fixture
def lone_process() -> Iterator[Any]:
    """A process group of one, which is returned."""
    from lowmem_load.distributed.process_group import DistributedInterface

    interface = DistributedInterface()
    yield interface
    interface.destroy()


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Any]]:
    """Run a subcommand in this process; return its exit code, and what it says: text, or with --json a value."""
    from lowmem_load.cli.start import app

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, Any]:
        texts = list(map(str, arguments))
        capsys.readouterr()
        try:
            code = app(texts, standalone_mode=False) or 0
        except SystemExit as ended:
            code = ended.code
        text = capsys.readouterr().out
        return code, json.loads(text) if "--json" in texts else text

    return run


@pytest.fixture
def quick_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets requests to remote stores fail soon, and be made again soon."""
    from lowmem_load.files import object_store

    monkeypatch.setattr(object_store, "DELAYS_S", (0.01, 0.01))
    monkeypatch.setattr(object_store, "TIMEOUT_S", 1)
    monkeypatch.setattr(object_store, "PATIENCE_S", 10)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, quick_requests: None) -> None:
    """Lets requests to remote stores that fail be made again for a moment only."""
    from lowmem_load.files import object_store

    monkeypatch.setattr(object_store, "PATIENCE_S", 1.5)
