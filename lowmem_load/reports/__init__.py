"""Reports of loads beyond one rank: files, tables, and many ranks joined."""
