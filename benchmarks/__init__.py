"""Benchmarks of lowmem_load: `python -m benchmarks.compare` measures it beside stock ZeRO-3 and a floor."""
