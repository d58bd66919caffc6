"""The command `lowmem-load`: one module per subcommand, put together in `start.py`."""
