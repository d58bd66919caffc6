"""Training with ZeRO-3 on part of a model and the rest replicated."""
