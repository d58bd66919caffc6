"""The table of foreign names: it is all that is replaced, it is true, and nothing stays replaced."""

import ast
import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowmem_load import foreign_names
from lowmem_load.foreign_names import TABLE
from lowmem_load.replaced import usable_names
from tests import builders
from tests.foreign_names_page import PAGE, page
from tests.ranks import REPO, run_ranks

PACKAGE = REPO / "lowmem_load"
MODULES = [path for path in PACKAGE.rglob("*.py") if path.name != "foreign_names.py"]
OF_FOREIGN_MODULES = {
    "engines/partition.py": {"torch.nn.functional.linear", "Init.param_id"},  # the second numbers parameters
    "engines/ops.py": {"deepspeed.comm.comm.cdb", "groups.name"},  # as they are before DeepSpeed's group is made
    "symbolic/lazy.py": {"nn.Parameter.data"},
}
"""What modules set of others by themselves."""


def imported_modules(tree: ast.AST) -> set[str]:
    """Returns the names that a module has for modules and classes of other packages."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lowmem_load"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def attributes_set(tree: ast.AST) -> Iterator[str]:
    """Yields each attribute that is set, with its object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (ast.unparse(target) for target in targets if isinstance(target, ast.Attribute))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"setattr", "delattr"}:
            yield f"{ast.unparse(node.args[0])}.{ast.unparse(node.args[1])}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_is_replaced_but_by_the_table(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "ForeignName"]
    assert not made, "names belong into foreign_names.py"
    imported = imported_modules(tree)
    foreign = {name for name in attributes_set(tree) if name.partition(".")[0] in imported and ")" not in name}
    assert foreign == OF_FOREIGN_MODULES.get(path.relative_to(PACKAGE).as_posix(), set())


def test_names_are_once_in_the_table() -> None:
    assert len({str(name) for name in TABLE}) == len(TABLE)


@pytest.mark.filterwarnings("error::lowmem_load.FallbackWarning")
@pytest.mark.parametrize(
    "package", ["transformers", "torch", "deepspeed", "accelerate", "peft", "bitsandbytes", "diffusers"]
)
def test_this_release_has_the_names_that_it_should_have(package: str) -> None:
    pytest.importorskip(package)
    no_functions = (foreign_names.SHARED_STATE, foreign_names.ASSIGNED_DATA)
    names = [name for name in TABLE if name.releases.package == package and name not in no_functions]
    assert usable_names(names)


def test_the_page_shows_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.foreign_names_page"


PACKAGES = {"accelerate", "bitsandbytes", "deepspeed", "peft", "safetensors", "torch", "transformers", "trl"}
ZERO_3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}


def functions() -> dict[str, Any]:
    """All functions of modules and classes of the packages that are imported."""
    seen: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in PACKAGES:
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, type) and value.__module__ == name:
                for inner, function in list(vars(value).items()):
                    seen[f"{name}.{key}.{inner}"] = getattr(function, "__func__", function)
            else:
                seen[f"{name}.{key}"] = value
    return {name: function for name, function in seen.items() if callable(function)}


def dispatchers() -> list[str]:
    """Those of them that are replaced."""
    from lowmem_load import replaced

    codes = {name: getattr(function, "__code__", None) for name, function in functions().items()}
    return [name for name, code in codes.items() if getattr(code, "co_filename", "") == replaced.__file__]


def load_install_and_load(path: str) -> tuple[list[str], set[str]]:
    """Rank function: what is replaced at the end, and what is another function than at the start."""
    from transformers import LlamaForCausalLM
    from transformers.integrations import deepspeed as integration

    import lowmem_load
    from lowmem_load.integrations.install import uninstall

    for optional in ("peft", "trl", "transformers.trainer", "bitsandbytes"):
        with contextlib.suppress(Exception):
            importlib.import_module(optional)

    def is_ours() -> bool:
        return hasattr(LlamaForCausalLM.from_pretrained(path), "lowmem_load_report")

    before = functions()
    lowmem_load.load_model(path, ZERO_3)
    lazy = lowmem_load.lazy(path)
    lowmem_load.install()
    kept = integration.HfDeepSpeedConfig(ZERO_3)
    assert is_ours()
    assert "transformers.modeling_utils.PreTrainedModel.save_pretrained" in dispatchers()
    uninstall()
    integration.unset_hf_deepspeed_config()
    assert not is_ours()
    del lazy, kept
    gc.collect()
    lowmem_load.load_model(path, ZERO_3)
    after = functions()
    assert integration._hf_deepspeed_config_weak_ref is None
    return dispatchers(), {name for name, function in before.items() if name in after and after[name] is not function}


def test_nothing_stays_replaced_after_loads_and_an_installation(checkpoints: Path) -> None:
    """Of what changed, DeepSpeed's is torch's `linear`, under memory_efficient_linear."""
    [(replaced, changed)] = run_ranks(load_install_and_load, str(builders.tiny_llama(checkpoints)), world_size=1)
    assert replaced == []
    assert changed <= {"torch.nn.functional.linear"}
