"""What DeepSpeed's ZeRO-3 checkpoints hold, read by byte ranges: into engines on any ranks, and into model folders."""
