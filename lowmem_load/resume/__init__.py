"""Training checkpoints, read by byte ranges: into engines on any ranks, and into model folders."""
