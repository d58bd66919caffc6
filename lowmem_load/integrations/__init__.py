"""ModelEngine, install and `lowmem-load run`: how pipelines reach the loader."""
