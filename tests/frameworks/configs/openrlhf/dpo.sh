#!/bin/bash
# As OpenRLHF's own examples/scripts/train_dpo.sh, but for the attention, which is flash_attention_2 there.
exec torchrun --nproc_per_node 2 --master_port "$MASTER_PORT" -m openrlhf.cli.train_dpo \
  --model.model_name_or_path ./model \
  --ref.model_name_or_path ./model \
  --ds.zero_stage 3 \
  --ds.attn_implementation sdpa \
  --data.dataset data/dpo.jsonl \
  --data.prompt_key prompt \
  --data.max_len 128 \
  --data.max_samples 16 \
  --train.max_epochs 1 \
  --train.micro_batch_size 2 \
  --train.batch_size 4 \
  --adam.lr 1e-4 \
  --lr_scheduler constant \
  --ckpt.output_dir output \
  "$@"
