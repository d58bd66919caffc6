"""Names of 0.3 still work, with a warning that says the new ones."""

import ast
import contextlib
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

import lowmem_load
from lowmem_load.distributed.process_group import fake_group
from lowmem_load.integrations import startup_hook
from lowmem_load.load.request import target_of
from lowmem_load.partial.partial_engine import PartialEngine
from lowmem_load.renamed import NAMES, renamed_keywords
from tests import builders
from tests.ranks import REPO

KEYWORDS: dict[Any, dict[str, str]] = {
    lowmem_load.load_model: {"stream": "download", "weights": "weights_from", "policy": "fully_shard_kwargs"},
    lowmem_load.load_into: {"leave": "skip", "stream": "download", "weights": "weights_from"},
    lowmem_load.lazy: {"stream": "download"},
    lowmem_load.install: {"stream": "download"},
    lowmem_load.load_checkpoint: {"trusted": "allow_pickle"},
    PartialEngine.load_checkpoint: {"trusted": "allow_pickle"},
    lowmem_load.consolidate: {"checkpoint_folder": "checkpoint", "output_folder": "folder"},
    lowmem_load.iter_weights: {"engine_or_model": "model", "to": "dst"},
    lowmem_load.push_weights: {"engine_or_model": "model"},
    lowmem_load.WeightSource.__init__: {"engine_or_model": "model", "to": "dst"},
}


def renamings() -> list[dict[str, str]]:
    """Returns the keywords of each function of the package that accepts old ones."""
    texts = [path.read_text() for path in (REPO / "lowmem_load").rglob("*.py")]
    trees = [ast.parse(text) for text in texts if "@renamed_keywords" in text]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calls = [call for node in functions for call in node.decorator_list if "renamed_keywords" in ast.unparse(call)]
    pairs = [[(each.arg, each.value) for each in call.keywords] for call in calls if isinstance(call, ast.Call)]
    return [{str(old): ast.literal_eval(new).split()[-1] for old, new in each} for each in pairs]


def test_all_keywords_are_tested() -> None:
    assert sorted(map(repr, renamings())) == sorted(map(repr, KEYWORDS.values()))


@pytest.mark.parametrize("function", KEYWORDS, ids=lambda function: function.__qualname__)
def test_an_old_keyword_warns_and_stands_for_the_new_one(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = inspect.signature(function).parameters
    for old, new in KEYWORDS[function].items():
        assert new in parameters or "keywords" in parameters
        warns = pytest.warns(DeprecationWarning, match=rf"{old}=\.\.\.\) is deprecated.*: use {new}=")
        with warns as caught, lowmem_load.install(), contextlib.suppress(TypeError):  # other arguments are missing
            function(**{old: None})
        assert [warning.filename for warning in caught] == [__file__]


def test_a_keyword_gets_the_value_or_its_opposite() -> None:
    @renamed_keywords(old="new", stream="not download")
    def function(new: int, *, download: bool = True) -> tuple[int, bool]:
        return new, download

    with pytest.warns(DeprecationWarning, match="use download="):
        assert function(7, stream=True) == (7, False)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="use new="):
        assert function(old=7) == (7, True)  # type: ignore[call-arg]
    both = pytest.raises(TypeError, match="new= and old=, its old name, are both given")
    with pytest.warns(DeprecationWarning, match="use new="), both:
        function(new=7, old=7)  # type: ignore[call-arg]


@pytest.mark.parametrize("old", NAMES)
def test_an_old_name_warns_and_is_the_new_one(old: str) -> None:
    module, _, name = f"lowmem_load.{NAMES[old]}".rpartition(".")
    instead = r"`with lowmem_load\.install\(\):`" if old == "streaming" else f"{module}.{name}"
    with pytest.warns(DeprecationWarning, match=f"lowmem_load.{old} is deprecated.* use {instead}") as caught:
        assert getattr(lowmem_load, old) is getattr(import_module(module), name)
    assert [warning.filename for warning in caught] == [__file__]
    assert old not in lowmem_load.__all__


def test_an_import_of_an_old_name_is_what_warns() -> None:
    program = "from lowmem_load import NotStreamedWarning"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=REPO)
    assert run.stderr.startswith("<string>:1: DeprecationWarning: lowmem_load.NotStreamedWarning is deprecated")


def test_a_mesh_and_a_distributed_config_may_be_given_as_the_ds_config(checkpoints: Path) -> None:
    distributed = pytest.importorskip("transformers.distributed")
    config = distributed.DistributedConfig(fsdp_size=2)
    with fake_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.warns(DeprecationWarning, match="DeviceMesh as ds_config is deprecated.*use mesh="):
            assert target_of(ds_config=mesh, mesh=None) == ("mesh", mesh)
    path, ranks = builders.tiny_llama(checkpoints), {"rank": 0, "world_size": 2}
    with pytest.warns(DeprecationWarning, match="DistributedConfig as ds_config .*use distributed_config="):
        old = lowmem_load.plan(path, config, **ranks)
    assert old.fingerprint == lowmem_load.plan(path, distributed_config=config, **ranks).fingerprint


@pytest.mark.parametrize(("given", "text"), [({}, "none"), ({"ds_config": {}, "mesh": 1}, "ds_config and mesh")])
def test_one_argument_says_where_parameters_go(given: dict[str, Any], text: str) -> None:
    with pytest.raises(lowmem_load.ConfigError, match=f"expected one of .*, got {text}$"):
        lowmem_load.load_model("name", **given)


def test_the_option_and_the_variable_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "lowmem_load", "run", "--stream", "--", "printenv", startup_hook.SWITCH]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO)
    assert run.stdout == "no-download\n"
    assert run.stderr == "lowmem-load run: --stream is deprecated, and goes in 0.5: use --no-download\n"
    called = []
    monkeypatch.setattr(lowmem_load.integrations.install, "install", lambda **options: called.append(options))
    monkeypatch.setenv(startup_hook.SWITCH, "strict,stream")
    startup_hook.switch_on()
    assert called[0].pop("on_load") and called == [{"strict": True, "stream": True}]
