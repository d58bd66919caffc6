"""What users call to load, stream and plan."""
