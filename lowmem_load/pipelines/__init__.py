"""Ways in for training pipelines: the model engine, its arguments, and `install`."""
