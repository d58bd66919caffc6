"""Runs at the start of every Python of a case, stock and ours: PYTHONPATH names this folder and the repository."""

from tests.frameworks.rank import watch

watch()
