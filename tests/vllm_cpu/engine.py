"""vLLM's engine on CPU, and its greedy outputs: `python -m tests.vllm_cpu.engine FOLDER OUT`."""

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


def fresh_engine(folder: Path) -> tuple[Any, Any]:
    """Return an engine of a saved model, or of the base of a saved adapter with a request for the latter."""
    options = {"max_model_len": 64, "max_num_batched_tokens": 4096, "skip_tokenizer_init": True}
    adapter = folder / "adapter_config.json"
    if not adapter.is_file():
        return loadable_engine(model=str(folder), **options), None
    from vllm.lora.request import LoRARequest

    base = json.loads(adapter.read_text())["base_model_name_or_path"]
    request = LoRARequest("saved", 1, str(folder.absolute()))
    return loadable_engine(model=base, enable_lora=True, **options), request


def greedy(engine: Any, request: Any = None) -> list[list[int]]:
    """Returns the tokens that follow the prompts."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    keywords = {} if request is None else {"lora_request": request}
    return [
        list(found.outputs[0].token_ids) for found in engine.generate(prompts, sampling, use_tqdm=False, **keywords)
    ]


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(greedy(*fresh_engine(Path(sys.argv[1])))))
