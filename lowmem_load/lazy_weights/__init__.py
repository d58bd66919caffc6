"""Models whose weights are read when somebody looks at them."""
