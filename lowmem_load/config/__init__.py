"""The ds_config and precision of a load, read once."""
