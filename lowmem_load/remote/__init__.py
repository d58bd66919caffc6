"""Checkpoints on the Hub, of which only what is asked for is fetched."""
