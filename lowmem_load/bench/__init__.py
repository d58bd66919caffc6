"""Loads of a checkpoint compared on this machine: stock, streamed, and what reading its bytes takes at the least."""
