"""Runs at the start of every Python of a case, both ways: PYTHONPATH names this folder and the repository."""

from tests.frameworks.rank import watch

watch()
