"""The releases of transformers that the seam was written for. Part of the transformers seam, see `loader.py`."""

from __future__ import annotations

from lowmem_load.contract import Releases

SUPPORTED = Releases("transformers", oldest="4.51.0", newest="5.23.0")
