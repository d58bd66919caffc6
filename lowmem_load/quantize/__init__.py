"""Weights that are stored quantized and trained around: what bitsandbytes makes of them, and which settings suit."""
