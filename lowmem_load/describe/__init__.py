"""Tensors that stand for expressions, so that loading code runs and reads nothing."""
