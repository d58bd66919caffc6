"""Byte sources, and the executor that fills memory from them as a plan says. Knows no names and no ZeRO."""
