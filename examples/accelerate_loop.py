"""Fine-tune with a plain training loop and accelerate under ZeRO-3; --lora trains a PEFT adapter.

torchrun --nproc-per-node 2 examples/accelerate_loop.py --model /tmp/tiny --output /tmp/out
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, InitProcessGroupKwargs, set_seed
from common import DS_CONFIG, finish, parse, read_jsonl, report, tokenize
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import lowmem_load


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train and save; return the loss of each step of this run."""
    options = parse(argv, __doc__)
    if not options.default_loader:
        lowmem_load.install()  # the one line

    set_seed(42)
    gpu = torch.cuda.is_available()
    accelerator = Accelerator(  # before from_pretrained: it makes ZeRO-3 active
        mixed_precision="bf16" if gpu else "no",
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=str(DS_CONFIG)),
        # without a GPU, accelerate has to be told the backend to see more than one rank
        kwargs_handlers=[] if gpu else [InitProcessGroupKwargs(backend="gloo")],
    )
    model = AutoModelForCausalLM.from_pretrained(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    loaded = model
    if options.lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)

    rows = [tokenize(row, tokenizer) for row in read_jsonl("sft.jsonl")]
    batches = DataLoader(rows, batch_size=2, collate_fn=DataCollatorForSeq2Seq(tokenizer))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    model.train()

    checkpoints = Path(options.output)
    first_step = 0
    if options.resume:
        last = max(checkpoints.glob("step-*"), key=lambda folder: int(folder.name.removeprefix("step-")))
        accelerator.load_state(str(last))
        first_step = int(last.name.removeprefix("step-"))

    losses = []
    for step in range(first_step, options.steps):
        batch = list(batches)[step % len(batches)]
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if (step + 1) % options.save_steps == 0:
            accelerator.save_state(str(checkpoints / f"step-{step + 1}"))

    state_dict = accelerator.get_state_dict(model)  # gathered on rank 0
    accelerator.unwrap_model(model).save_pretrained(
        checkpoints / "final",
        state_dict=state_dict,
        is_main_process=accelerator.is_main_process,
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(checkpoints / "final")
    return report(losses, loaded)


if __name__ == "__main__":
    main()
    finish()
