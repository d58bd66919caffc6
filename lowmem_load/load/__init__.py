"""What callers use: loads by name, loads inside code that is not theirs, and what can be known without a load."""
