"""Whether bytes are what they should be: files against known checksums, and a digest of a loaded model."""
