"""Weights of a partitioned model, put together on the ranks: `iter_weights` and `push_weights`."""
