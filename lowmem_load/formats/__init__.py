"""Checkpoint files as named tensors: safetensors, torch zip, and the index files beside them. Untrusted input."""
