"""Saving: a folder as `save_pretrained` writes it, each byte of it by the rank that holds it."""
