"""Without asserts, which python -O drops, another DeepSpeed is refused as well."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import FileFinder, SourceFileLoader
from types import CodeType

import pytest

from tests.ranks import run_ranks


class Optimised(SourceFileLoader):
    """Compiles modules as python -O does."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=1)
        return code


def import_without_a_name() -> None:
    """Rank function: the package is imported anew, of a DeepSpeed that lacks a name."""
    import deepspeed.runtime.zero.partition_parameters as owner

    for name in [name for name in sys.modules if name.partition(".")[0] == "lowmem_load"]:
        del sys.modules[name]
    sys.path_hooks.insert(0, FileFinder.path_hook((Optimised, [".py"])))
    sys.path_importer_cache.clear()
    del owner.ZeroParamStatus
    with pytest.raises(ImportError) as caught:
        importlib.import_module("lowmem_load.ds.partition")
    message = f"{type(caught.value).__name__}: {caught.value}"
    assert message.startswith("IncompatibleVersionError: deepspeed "), message
    assert ".ZeroParamStatus." in message and "; lowmem_load works with deepspeed 0" in message
    assert type(sys.modules["lowmem_load.foreign_names"].__loader__).__name__ == "Optimised"


def test_a_deepspeed_without_a_name_is_refused() -> None:
    run_ranks(import_without_a_name, world_size=1)
