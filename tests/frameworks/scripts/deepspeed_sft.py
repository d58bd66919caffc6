"""No framework: `HfDeepSpeedConfig`, `from_pretrained`, `deepspeed.initialize`, a loop; `--lora` trains an adapter."""

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import HfDeepSpeedConfig

CONFIG = {
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 1_000_000,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": "--bf16" in sys.argv},
    "train_micro_batch_size_per_gpu": 2,
}


def batch(tokenizer: Any, step: int) -> dict[str, torch.Tensor]:
    """Return the rows of this rank and step, padded; padding is not learned."""
    lines = Path("data/sft.jsonl").read_text(encoding="utf-8").splitlines()
    first = 4 * step + 2 * deepspeed.comm.get_rank()
    rows = [json.loads(line) for line in lines[first : first + 2]]
    found = tokenizer([row["prompt"] + row["completion"] for row in rows], padding=True, return_tensors="pt")
    labels = found["input_ids"].masked_fill(found["attention_mask"] == 0, -100)
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "labels": labels}


def main() -> None:
    deepspeed.init_distributed()
    alive = HfDeepSpeedConfig(CONFIG)  # transformers holds it weakly
    dtype = torch.bfloat16 if CONFIG["bf16"]["enabled"] else torch.float32
    model = AutoModelForCausalLM.from_pretrained("model", dtype=dtype)
    del alive
    tokenizer = AutoTokenizer.from_pretrained("model")
    if "--lora" in sys.argv:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model.train(), model_parameters=trained, optimizer=optimizer, config=CONFIG)
    for step in range(4):
        loss = engine(**batch(tokenizer, step)).loss
        engine.backward(loss)
        engine.step()
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    state = engine._zero3_consolidated_16bit_state_dict()
    if deepspeed.comm.get_rank() == 0:
        Path("output").mkdir()
        save_file({name: state[name].clone() for name in names}, "output/model.safetensors")


if __name__ == "__main__":
    main()
