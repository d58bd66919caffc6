"""Which tensors of a module `load_into` leaves to the caller."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_load.errors import ConfigError
from lowmem_load.load.load_into import IntoModule

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}


class Norm(nn.Module):
    """A module with an extra state."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.zeros(1)

    def set_extra_state(self, state: Any) -> None:
        pass


class Policy(nn.Module):
    """A transformers model with tied weights, and a head that is to be filled."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.llm = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
        self.llm.norm = Norm()
        self.value = nn.Linear(2, 1, bias=False)


TIED = {"lm_head.weight", "model.embed_tokens.weight"}


@pytest.mark.parametrize(
    ("leave", "left"),
    [
        ([], set()),
        (["llm.lm_head.weight"], TIED),
        (["model.embed_tokens.weight"], TIED),
        (["llm.model.norm.weight"], {"model.norm.weight"}),
        (["llm.norm._extra_state"], {"norm._extra_state"}),
        (["norm._extra_state"], {"norm._extra_state"}),
    ],
)
def test_what_is_left_is_named_in_the_module_or_in_its_model(leave: list[str], left: set[str]) -> None:
    assert IntoModule(Policy(), "folder", kwargs={}, skip=["value.weight", *leave]).left == left


@pytest.mark.parametrize("unknown", ["lm_head.weigth", "llm.lm_head", "llm.value.weight", "value._extra_state"])
def test_a_name_of_no_tensor_is_refused(unknown: str) -> None:
    with pytest.raises(ConfigError, match=f"skip: the module has no parameter or buffer {unknown}"):
        IntoModule(Policy(), "folder", kwargs={}, skip=["value.weight", unknown])


@pytest.mark.parametrize("how", [{}, {"rename": {}}])
def test_a_text_is_no_collection_of_names(how: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"skip: 'value.weight' is one name; pass .* \['value.weight'\]"):
        IntoModule(Policy(), "folder", kwargs={}, skip="value.weight", **how)
