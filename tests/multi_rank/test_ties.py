"""What a config ties and the files tell apart: both tensors are kept, as in an ordinary load. And the reverse."""

import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lowmem_load
from lowmem_load import CheckpointError, get_load_report, load_into, load_model, plan, save_model
from lowmem_load.load.load_model import plan_rank
from lowmem_load.symbolic.lazy import is_unread
from tests import builders
from tests.model_digest import differing
from tests.multi_rank.test_accelerate_fsdp2 import ENVIRONMENT, prepare
from tests.multi_rank.test_load_into import built, shard_fully, start
from tests.ranks import run_ranks


def ordinary(path: str) -> nn.Module:
    cls = getattr(transformers, transformers.AutoConfig.from_pretrained(path).architectures[0])
    model: nn.Module = cls.from_pretrained(path, dtype=torch.bfloat16)
    return model


def check_saved(model: nn.Module, reference: nn.Module, folder: str) -> None:
    """A saved model is loaded again as the same one. Collective."""
    save_model(model, folder)
    again = ordinary(folder)
    assert differing(again, reference) == []
    assert (again.lm_head.weight is again.get_input_embeddings().weight) == (
        reference.lm_head.weight is reference.get_input_embeddings().weight
    )


def with_own_head(path: str) -> nn.Module:
    model = built(path, torch.bfloat16)
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


def load_all(paths: dict[str, str], tied: str, folder: str) -> list[int]:
    """Rank function: what the load of a `DistributedConfig` has read."""
    mesh = init_device_mesh("cpu", (start(),))
    for name, path in {**paths, "tied": tied}.items():
        reference = ordinary(path)
        assert (reference.lm_head.weight is reference.get_input_embeddings().weight) == (name == "tied")
        model = load_model(path, mesh=mesh, dtype=torch.bfloat16)
        assert differing(model, reference) == [], name
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == (name == "tied")
        check_saved(model, reference, f"{folder}/{name}-mesh")

        model = with_own_head(path)  # of a caller, who may have tied nothing
        shard_fully(model, mesh=mesh)
        model.to_empty(device="cpu")
        load_into(model, path)
        check_saved(model, reference, f"{folder}/{name}-into")
        assert differing(model, reference.to(torch.bfloat16)) == [], name

    for name, path in paths.items():
        model = built(path, torch.bfloat16)
        shard_fully(model, mesh=mesh)
        model.to_empty(device="cpu")
        both = "model.embed_tokens.weight and lm_head.weight" if name == "qwen2" else "shared.weight and lm_head.weight"
        with pytest.raises(CheckpointError, match=f"{both}: the model has one parameter for both.* Give each"):
            load_into(model, path)

    return load_installed(paths["qwen2"], folder)


def load_installed(path: str, folder: str) -> list[int]:
    from transformers.distributed import DistributedConfig

    lowmem_load.install()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, distributed_config=DistributedConfig(fsdp_size=2)
    )
    lowmem_load.integrations.install.uninstall()
    reference = ordinary(path)
    assert differing(model, reference) == []
    assert model.all_tied_weights_keys == reference.all_tied_weights_keys == {}
    check_saved(model, reference, f"{folder}/installed")
    return [get_load_report(model).needed_bytes, get_load_report(model).read_bytes]


@pytest.mark.filterwarnings("ignore")
def test_transformers_decides_what_is_tied(checkpoints: Path, tmp_path: Path) -> None:
    qwen2, t5 = builders.tiny_qwen2_differing(checkpoints), builders.tiny_t5_differing(checkpoints)
    tied = str(builders.tiny_qwen2_tied(checkpoints))
    costs = run_ranks(load_all, {"qwen2": str(qwen2), "t5": str(t5)}, tied, str(tmp_path), timeout_s=300)
    for rank, cost in enumerate(costs):
        config = transformers.distributed.DistributedConfig(fsdp_size=2)
        planned = plan(qwen2, distributed_config=config, rank=rank, world_size=2, dtype=torch.bfloat16)
        compared = sum(nbytes for _, nbytes in planned.read_to_describe)
        assert [planned.costs.needed_bytes, planned.costs.read_bytes + compared] == cost


def prepare_all(paths: dict[str, str], folder: str) -> None:
    """Rank function: with efficient loading, accelerate itself ties again by the config."""
    start()
    for name, path in paths.items():
        for efficient in (True, False):
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = str(efficient)
            lowmem_load.install()
            cls = type(ordinary(path))
            pending = cls.from_pretrained(path, dtype=torch.bfloat16)
            assert all(map(is_unread, pending.parameters()))
            model = prepare(pending, efficient=efficient)
            lowmem_load.integrations.install.uninstall()
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"  # or the first rank alone has values
            reference = ordinary(path)
            assert differing(model, reference) == [], (name, efficient)
            check_saved(model, reference, f"{folder}/{name}-{efficient}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["qwen2_differing", *(pytest.param(each, marks=pytest.mark.release) for each in ("t5_differing", "qwen2_tied"))],
)
def test_what_accelerate_ties_by_the_config_stays_apart(checkpoints: Path, tmp_path: Path, name: str) -> None:
    path = getattr(builders, f"tiny_{name}")(checkpoints)
    run_ranks(prepare_all, {name: str(path)}, str(tmp_path), env=ENVIRONMENT, timeout_s=300)


# -- parameters that a constructor shares ------------------------------------------------------------------------------


class Shared(transformers.PreTrainedModel):
    """One embedding in two places, both of which the class ties to a third."""

    config_class = transformers.LlamaConfig
    _tied_weights_keys = {"enc.embed.weight": "shared.weight", "dec.embed.weight": "shared.weight"}  # noqa: RUF012
    files = ("shared.weight",)

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__(config)
        self.shared, embed = nn.Embedding(8, 8), nn.Embedding(8, 8)
        self.enc, self.dec = nn.ModuleDict({"embed": embed}), nn.ModuleDict({"embed": embed})
        self.post_init()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.dec["embed"](tokens)
        return embedded @ self.shared.weight.T


class Undeclared(transformers.PreTrainedModel):
    """One parameter in two places, which the class does not say: an ordinary load gives each place its own."""

    config_class = transformers.LlamaConfig
    files: tuple[str, ...] = ("a.weight", "b.weight")

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__(config)
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight
        self.post_init()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.b(self.a.weight[tokens])
        return hidden


class OneFile(Undeclared):
    """The files have one of both: the other is drawn."""

    files = ("a.weight",)


SHARING: tuple[type, ...] = (Shared, Undeclared, OneFile)


def sharing_folder(cls: type, folder: str) -> str:
    path = Path(folder, cls.__name__)
    config = transformers.LlamaConfig(hidden_size=8, num_attention_heads=2, vocab_size=8, tie_word_embeddings=True)
    config.save_pretrained(path)
    torch.manual_seed(0)
    tensors = {name: torch.randn(8, 8) for name in cls.files}  # type: ignore[attr-defined]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return str(path)


def load_sharing(folder: str) -> list[int]:
    """Rank function: over a mesh as in an ordinary load; a forward, too. Returns what the loads have read."""
    mesh, tokens, costs = init_device_mesh("cpu", (start(),)), torch.arange(8), []
    for cls in SHARING:
        path = f"{folder}/{cls.__name__}"
        torch.manual_seed(torch.distributed.get_rank() or 7)  # rank 0's counts
        model = load_model(path, mesh=mesh, auto_class=cls, dtype=torch.float32)
        torch.manual_seed(7)
        reference = cls.from_pretrained(path, dtype=torch.float32)  # type: ignore[attr-defined]
        assert differing(model, reference) == [], cls
        assert len(list(model.parameters())) == len(list(reference.parameters())), cls
        torch.testing.assert_close(model(tokens), reference(tokens))
        costs.append(get_load_report(model).read_bytes)
    return costs


@pytest.mark.filterwarnings("ignore")
def test_what_a_constructor_shares_is_as_after_an_ordinary_load(tmp_path: Path) -> None:
    paths = {sharing_folder(cls, str(tmp_path)): cls for cls in SHARING}
    for rank, costs in enumerate(run_ranks(load_sharing, str(tmp_path), timeout_s=120)):
        for (path, cls), cost in zip(paths.items(), costs, strict=True):
            planned = plan_rank(path, sharding=(2,), rank=rank, world_size=2, auto_class=cls, dtype=torch.float32)
            assert planned.costs.read_bytes == cost, cls
