"""Checkpoints that trainers write, each rank its own part: full tensors as expressions over all files."""
