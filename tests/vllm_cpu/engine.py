"""vLLM's engines on CPU, and their greedy outputs: `python -m tests.vllm_cpu.engine OUT FOLDER ...`."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.ranks import REPO

PROMPTS = [[1, 2, 3], [10, 20, 30, 40], [200], [7, 7, 7, 7, 7], [*range(70)]]
"""The last one fills blocks of the cache, from which vLLM answers again until that is reset."""
ARGUMENTS = {"enforce_eager": True, "dtype": "float32", "block_size": 32, "max_model_len": 128}


def loadable_engine(**arguments: Any) -> Any:
    """Returns an engine into which weights can be loaded again: oneDNN packs them, and vLLM then drops its own."""
    from vllm import LLM, _custom_ops

    _custom_ops._supports_onednn = False
    return LLM(**ARGUMENTS | arguments)


def model_of(engine: Any) -> Any:
    """Returns vLLM's model, which an engine has in this process."""
    return engine.llm_engine.model_executor.driver_worker.model_runner.model


def client_of(engine: Any) -> Any:
    """Return the page's client for vLLM in the same process, which notes what comes, and dies if it is told when."""
    page = (REPO / "docs/howto/rlhf.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Client" in code)
    names = {"model": model_of(engine), "llm": engine}
    exec(code, names)

    class Client(names["Client"]):  # type: ignore[misc]
        kinds, buckets_to_live = set[str](), -1

        def apply_changes(self, bucket: Any) -> None:
            self.kinds.update(type(new).__name__ for _, new in bucket)
            super().apply_changes(bucket)
            self.buckets_to_live -= 1
            if not self.buckets_to_live:
                raise ConnectionError("the engine is gone")

    return Client()


def outputs_of(folders: list[str]) -> list[Any]:
    """Return the outputs of saved models, which one engine loads after each other, or of adapters over their base."""
    adapter, outputs = Path(folders[0], "adapter_config.json"), []
    base = json.loads(adapter.read_text())["base_model_name_or_path"] if adapter.is_file() else None
    options = {"max_num_batched_tokens": 4096, "skip_tokenizer_init": True, "enable_lora": base is not None}
    engine, request = loadable_engine(model=base or folders[0], **options), None
    for number, folder in enumerate(folders):
        if base is not None:
            from vllm.lora.request import LoRARequest

            request = LoRARequest(folder, number + 1, str(Path(folder).absolute()))
        elif number:
            engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            assert engine.reset_prefix_cache()
        outputs.append(greedy(engine, request))
    return outputs


def greedy(engine: Any, request: Any = None) -> list[Any]:
    """Returns the tokens that follow the prompts, and the logarithms of their probabilities."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    keywords = {} if request is None else {"lora_request": request}
    found = [each.outputs[0] for each in engine.generate(prompts, sampling, use_tqdm=False, **keywords)]
    return [
        [list(out.token_ids), [of[token].logprob for of, token in zip(out.logprobs, out.token_ids, strict=True)]]
        for out in found
    ]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(outputs_of(sys.argv[2:])))
