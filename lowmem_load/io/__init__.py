"""Byte sources, the executor of plans, device staging, reads that the ranks of a node share."""
