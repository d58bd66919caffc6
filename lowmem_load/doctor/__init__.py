"""What of a machine decides whether, and how fast, models load on it; and what to do about it."""
