"""The process group, agreement of the ranks, nodes and what they share."""
