"""A simulated accelerator, for what only a GPU would show; see README.md."""
