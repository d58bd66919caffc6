"""The transformers seam: the only folder that touches what is private to transformers."""
