"""Load a model into ZeRO-3 partitions, train it for three steps, save it.

torchrun --nproc-per-node 2 examples/first_load.py MODEL OUT
"""

import sys

import deepspeed
import torch

from lowmem_load import get_load_report, load_model, save_model

path, out = sys.argv[1:]
ds_config = {
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}
model = load_model(path, ds_config).train()  # it comes back in eval mode, as from from_pretrained
report = get_load_report(model)
if report.rank == 0:
    print(report)

engine, *_ = deepspeed.initialize(model=model, config=ds_config)
tokens = torch.tensor([[1, 72, 101, 108, 108, 111]], device=engine.device)
for step in range(3):
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    if report.rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

save_model(engine, out)
torch.distributed.destroy_process_group()
