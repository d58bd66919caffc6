"""The process group, and agreement among its ranks."""
