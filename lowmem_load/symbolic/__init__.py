"""Tensors that stand for expressions, and how a model is described with them."""
