"""Benchmarks of lowmem_load: `python -m benchmarks.compare` measures it next to the default loader and a floor."""
