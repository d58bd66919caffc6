"""What a checkpoint holds, and what loading it takes, from its headers."""
