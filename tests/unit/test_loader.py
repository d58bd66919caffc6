"""What stands in for what transformers has: alike to it, and gone afterwards."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.core_model_loading as loading
from safetensors.torch import save_file

from lowmem_load.errors import HeaderError
from lowmem_load.files.safetensors import Safetensors
from lowmem_load.files.source import LocalFile, OpenSources
from lowmem_load.models.loader import collecting_handlers
from lowmem_load.planning.expression import Expression
from lowmem_load.replaced import replaced
from lowmem_load.symbolic.constructor import Context
from lowmem_load.symbolic.initialise import Initialiser
from tests import builders


def read_nothing(expression: Expression, reason: str) -> torch.Tensor:
    raise AssertionError(f"{reason} read {expression}")


# -- imports ---------------------------------------------------------------------------------------------------------

NEEDED_BY_SOME = ("engines.partition", "resume", "partial", "integrations.llamafactory", "cli")


PROGRAM = """
import sys, lowmem_load
lowmem_load.load_model, lowmem_load.install
print(*sys.modules)
import torch, transformers.modeling_utils
planned = lowmem_load.plan(sys.argv[1], {"zero_optimization": {"stage": 3}}, rank=511, world_size=512)
assert planned.costs.read_bytes == planned.costs.needed_bytes < 1000
lowmem_load.install()
assert not torch.distributed.is_initialized()
if hasattr(transformers.PreTrainedModel, "maybe_distribute_model"):  # else transformers shards no model
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    lowmem_load.load_model(sys.argv[1], mesh=torch.distributed.init_device_mesh("cpu", (1,)))
assert "deepspeed" not in sys.modules, "deepspeed was imported"
import deepspeed
assert deepspeed.initialize.__code__.co_filename == lowmem_load.replaced.__file__, "deepspeed is not hooked"
"""


def test_a_plain_process_imports_only_what_it_needs(tmp_path: Path) -> None:
    """DeepSpeed takes a second to import. Digests and plans need no group either."""
    command = [sys.executable, "-c", PROGRAM, str(builders.tiny_llama(tmp_path))]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    ours = {name for name in run.stdout.splitlines()[0].split() if name.startswith("lowmem_load.")}
    assert not ours & {f"lowmem_load.{name}" for name in NEEDED_BY_SOME}


# -- what collects tensors, and describes files ------------------------------------------------------------------------


def converter() -> object:
    return loading.WeightConverter("experts.*.up", "experts.up", [loading.MergeModulelist(0)])


def test_a_copy_that_has_collected_nothing_is_handed_out_again() -> None:
    one, other = converter(), converter()
    with replaced(collecting_handlers()):
        first = loading.deepcopy(one)
        assert first is not one
        assert loading.deepcopy(one) is first
        assert loading.deepcopy(other) is not first
        first.add_tensor("model.experts.up", "experts.0.up", "experts.*.up", list)
        second = loading.deepcopy(one)
        assert second is not first
        assert second.collected_tensors == one.collected_tensors == {}
        assert first.materialize_tensors() == {"experts.*.up": [[]]}  # what the job gives when it is called
        assert first.layer_targets == {"model.experts.up": {"experts.0.up"}}


def test_names_are_sorted_by_keys_that_share_their_parts() -> None:
    names = ["layers.10.experts.2.up", "layers.9.experts.2.up", "layers.9.shard_3"]
    ordinary = [loading.dot_natural_key(name) for name in names]
    with replaced(collecting_handlers()):
        keys = [loading.dot_natural_key(name) for name in names]
    assert keys == ordinary
    assert keys[0][2] is keys[1][2]


def test_tensors_are_made_without_threads() -> None:
    tensor = torch.arange(3.0)
    with replaced(collecting_handlers()):
        pool: Any = object()  # of which nothing is asked
        job = loading.spawn_materialize(pool, tensor, "cpu", torch.bfloat16)
        assert torch.equal(job(), loading._materialize_copy(tensor, "cpu", torch.bfloat16))
        assert job().dtype == torch.bfloat16


@pytest.fixture
def context() -> Iterator[Context]:
    sources = OpenSources(LocalFile)
    yield Context(read_nothing, Initialiser(read_nothing), pytest.fail, lambda model: None, sources.opened)
    sources.close()


def test_a_file_is_described_once_unless_that_fails(context: Context, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.safetensors", "b.safetensors")]
    for number, path in enumerate(paths):
        save_file({f"w{number}": torch.ones(3)}, path)
    found = [context.file(path, Safetensors()) for path in (*paths, *paths)]
    assert [file.names for file in found] == [("w0",), ("w1",)] * 2
    assert found[0] is found[2] and found[1] is found[3]
    (tmp_path / "c.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00[]")
    with pytest.raises(HeaderError):
        context.file(str(tmp_path / "c.safetensors"), Safetensors())
    assert context.files == {paths[0]: found[0], paths[1]: found[1]}
