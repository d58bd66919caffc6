"""The command `lowmem-load`: its subcommands are put together in `start.py`."""
