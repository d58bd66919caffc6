"""The DeepSpeed seam: the only folder that touches what is private to DeepSpeed."""
