"""Environment first: torch, DeepSpeed and transformers read it on import."""

from tests.ranks import set_environment

set_environment()

import sys  # noqa: E402
from pathlib import Path  # noqa: E402

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


@pytest.fixture(scope="session", autouse=True)
def dtype_keyword() -> None:
    if "transformers" in sys.modules:  # else no test of this session needs it
        from tests.dtype_keyword import accept_dtype

        accept_dtype()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that tests/builders.py puts its checkpoints in: each is made once per session."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of the real MiniLM weights (BERT, float32, one safetensors file of 91 MB)."""
    from tests.builders import minilm_path

    return minilm_path()
