"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"
"""Levels: as it should be; worth knowing; something will fail, or wrongly run, unless it is mended."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        area: what it is about: "versions", "storage".
        level: `OK`, `NOTE` or `PROBLEM`.
        found: in words.
        advice: what to do; "" where nothing need be done.
    """

    area: str
    level: str
    found: str
    advice: str = ""
