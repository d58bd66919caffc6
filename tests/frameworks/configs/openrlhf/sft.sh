#!/bin/bash
# As OpenRLHF's own examples/scripts/train_sft.sh, but for the attention, which is flash_attention_2 there.
exec torchrun --nproc_per_node 2 --master_port "$MASTER_PORT" -m openrlhf.cli.train_sft \
  --model.model_name_or_path ./model \
  --ds.zero_stage 3 \
  --ds.attn_implementation sdpa \
  --data.dataset data/sft.jsonl \
  --data.input_key prompt \
  --data.output_key completion \
  --data.max_len 128 \
  --data.max_samples 16 \
  --train.max_epochs 1 \
  --train.micro_batch_size 2 \
  --train.batch_size 4 \
  --adam.lr 1e-3 \
  --lr_scheduler constant \
  --ckpt.output_dir output \
  "$@"
