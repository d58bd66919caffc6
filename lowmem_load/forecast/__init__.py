"""What a load, and the training after it, will need: bytes, reads and seconds, and whether that is there."""
