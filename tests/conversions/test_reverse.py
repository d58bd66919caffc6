"""Every converter of transformers' mapping, turned back: what the ranks write is what transformers' own code gives."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers.core_model_loading import WeightConverter, dot_natural_key

from lowmem_load.planning.expression import Source
from lowmem_load.symbolic.tensor import SymbolicTensor
from lowmem_load.weights_out.weight_files import Writer, plan_writes
from tests.conversions import mappings
from tests.conversions.mappings import DTYPES, Case, Chain
from tests.unit.test_saving_plan import layout_of, write_part

CHAINS = mappings.chains()


def turn_back(converter: WeightConverter, case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of files that the model's tensors become.

    Source: transformers 5.23 `core_model_loading.py`, `revert_weight_conversion`.
    """
    reverse = deepcopy(converter).reverse_transform()
    config = case.config
    config.get_text_config().split_ngram_parts = len(case.shapes)  # how many pieces one chain asks for
    mapped: dict[str, WeightConverter] = {}
    for key in sorted(tensors, key=dot_natural_key):
        renamed, pattern = reverse.rename_source_key(key)
        mapping = mapped.setdefault(renamed, deepcopy(reverse))
        mapping.add_tensor(renamed, key, pattern, tensors[key])
    results: dict[str, torch.Tensor] = {}
    for first, mapping in mapped.items():
        for name, value in mapping.convert(first, model=case.model, config=config).items():
            results[name] = value[0] if isinstance(value, list) else value
    return results


@pytest.mark.parametrize("chain", CHAINS, ids=[chain.id for chain in CHAINS])
def test_all_ranks_write_what_transformers_gives(chain: Chain, tmp_path: Path) -> None:
    source, path = tmp_path / "source", tmp_path / "saved"
    for case in mappings.cases(chain.converter):
        mappings.write_sources(case, DTYPES["bf16"], source)
        with safe_open(source, "pt") as file:
            model = mappings.convert(chain.converter, case, file, None)
        model = {name: value.contiguous() for name, value in model.items()}
        wanted = turn_back(chain.converter, case, model)
        symbols = {
            name: SymbolicTensor(Source("", name, 0, tuple(value.shape), value.dtype), pytest.fail)
            for name, value in model.items()
        }
        described = turn_back(chain.converter, case, symbols)
        tensors = {name: value.expression for name, value in described.items()}
        layout = layout_of("saved", tensors)
        writes = plan_writes([layout])
        for world_size in mappings.WORLD_SIZES:
            content = bytearray(layout.header + bytes([mappings.UNWRITTEN]) * (layout.nbytes - len(layout.header)))
            written = 0
            for offset, values in layout.constants.items():  # padding
                content[offset : offset + len(values)] = values
                written += len(values)
            path.write_bytes(content)
            for rank in range(world_size):
                with Writer([path], lambda _: None) as writer:
                    write_part(writer, writes, model, rank, world_size)
                    written += writer.written_bytes
            assert written == layout.nbytes - len(layout.header)
            saved = load_file(path)
            assert saved.keys() == wanted.keys()
            for name, value in wanted.items():
                assert torch.equal(saved[name].view(torch.int16), value.contiguous().view(torch.int16)), name
