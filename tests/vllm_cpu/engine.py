"""vLLM's engine on CPU, and its greedy outputs: `python -m tests.vllm_cpu.engine FOLDER OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[1, 2, 3], [10, 20, 30, 40], [200], [7, 7, 7, 7, 7]]
ARGUMENTS = {"enforce_eager": True, "dtype": "float32"}


def loadable_engine(**arguments: Any) -> Any:
    """Returns an engine into which weights can be loaded again: oneDNN packs them, and vLLM then drops its own."""
    from vllm import LLM, _custom_ops

    _custom_ops._supports_onednn = False
    return LLM(**arguments, **ARGUMENTS)


def greedy(engine: Any) -> list[list[int]]:
    """Returns the tokens that follow the prompts."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [list(found.outputs[0].token_ids) for found in engine.generate(prompts, sampling, use_tqdm=False)]


if __name__ == "__main__":
    made = loadable_engine(model=sys.argv[1], max_model_len=64, max_num_batched_tokens=4096, skip_tokenizer_init=True)
    Path(sys.argv[2]).write_text(json.dumps(greedy(made)))
