"""Weights that leave a model or a training checkpoint, into files or messages."""
