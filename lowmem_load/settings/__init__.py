"""What a ds_config asks for: read once, resolved once, passed down."""
