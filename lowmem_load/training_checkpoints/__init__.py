"""Checkpoints that trainers write, each rank its own part: whole tensors as expressions over all files."""
