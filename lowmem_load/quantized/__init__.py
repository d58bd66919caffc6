"""Quantized formats: a class for each, in a module of its own."""
