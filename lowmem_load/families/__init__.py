"""Families of models: what a load needs of each. transformers' family is in hf/."""
