"""Runs at the start of every Python whose PYTHONPATH names this folder: see `integrations/startup_hook.py`.

A Python that lacks lowmem_load, or is too old for it, must not notice. So this file is valid in Python 2 too.
"""

import os
import sys

_this = sys.modules[__name__]
_folder = os.path.dirname(os.path.abspath(__file__))

try:
    from lowmem_load.integrations.startup_hook import watch
except (ImportError, SyntaxError):
    pass
else:
    watch()

# Import the sitecustomize that this one hides, if there is one. `site` reports an error in it, as always.
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _folder]
del sys.modules[__name__]
try:
    __import__(__name__)
except ImportError as error:
    if getattr(error, "name", "sitecustomize") != "sitecustomize":
        raise
    sys.modules[__name__] = _this
