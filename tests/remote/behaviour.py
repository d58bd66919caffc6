"""How a server of `range_server` answers: which requests fail and how, and who may ask."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import math
import random
import re
import time
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qs, urlencode

BEFORE_BODY = ("error_500", "error_503", "slow_down", "too_many", "reset_before")
IN_BODY = ("reset_middle", "cut", "short", "stall")
CHANCES = (*BEFORE_BODY, *IN_BODY)
"""The fields of Behaviour that are shares of requests: of one request in that many, 0.01 is 1 %."""


@dataclass(frozen=True)
class Behaviour:
    """All that can be set at a server, at its start or later.

    Shares are of the requests for files, from 0 to 1, and go by the number of the request and the seed: the same
    requests fail whenever the same number has been asked. Those that have no body to fail are answered as usual.
    """

    seed: int = 0
    """Another seed, other requests that fail."""
    error_500: float = 0
    """Share answered 500."""
    error_503: float = 0
    """Share answered 503."""
    slow_down: float = 0
    """Share answered 503 with S3's XML of a SlowDown."""
    too_many: float = 0
    """Share answered 429."""
    reset_before: float = 0
    """Share whose connection is reset without an answer."""
    reset_middle: float = 0
    """Share whose connection is reset after half of the body."""
    cut: float = 0
    """Share whose connection is closed in order after half of the body."""
    short: float = 0
    """Share of requests for ranges that are answered with a well-formed 206 of the first half of the range."""
    stall: float = 0
    """Share that gets half of the body, then nothing for stall_s seconds, then the rest."""
    stall_s: float = 30
    at_most: int = -1
    """So many requests fail by their share, and none after; -1: no limit."""
    only: str = ""
    """A regular expression that is searched for in paths: other requests neither fail nor count; empty: all."""

    latency_ms: float = 0
    """Wait before each answer."""

    lists: bool = True
    """Answer the URL of a folder with a page of links."""
    ignores_ranges: bool = False
    """Answer with whole files."""
    shifts: int = 0
    """Bytes by which other ranges are sent than are asked for."""
    adds: int = 0
    """Zero bytes that follow each range."""
    head_status: int = 0
    """Answer HEAD with this status; 0: as GET, without a body."""
    weak_etags: bool = False
    no_etags: bool = False

    gone: bool = False
    """Answer 403 to everything."""
    repeats: bool = False
    """The XML of a 403 repeats the request and its tokens, as that of AWS does when a signature or a token is wrong."""
    token: str = ""
    """Answer 401 unless requests have it as their bearer token."""
    refuse_authorization: bool = False
    """Answer 400 to requests with an Authorization header, as S3 does to those that are signed besides."""
    redirect_to: str = ""
    """The URL of another server, with no slash at its end: requests for files go there by 302, signed."""
    secret: str = ""
    """What URLs are signed with; it is the first part of signatures, for tests that look whether they leak."""
    valid_s: float = 60
    """How long signed URLs are good, to the next whole second."""
    check_signature: bool = False
    """Answer 403 unless the URL is signed with the secret and not expired."""

    def changed(self, changes: dict[str, Any]) -> Behaviour:
        """A copy with other values; raises TypeError or ValueError for what is none."""
        types = {field.name: type(field.default) for field in fields(self)}
        for name, value in changes.items():
            if name not in types:
                raise TypeError(f"{name}: not one of {', '.join(types)}")
            if not isinstance(value, (int, float) if types[name] in (int, float) else types[name]):
                raise TypeError(f"{name}: {value!r} is no {types[name].__name__}")
        changed = dataclasses.replace(self, **changes)
        if sum(getattr(changed, name) for name in CHANCES) > 1:
            raise ValueError("the shares add up to more than 1")
        return changed

    def fault(self, number: int) -> str:
        """Which of CHANCES befalls a request, or ""."""
        drawn = random.Random(f"{self.seed}:{number}").random()
        for name in CHANCES:
            drawn -= getattr(self, name)
            if drawn < 0:
                return name
        return ""

    def counts(self, path: str) -> bool:
        """Whether a request for this path may fail by its share."""
        return any(getattr(self, name) for name in CHANCES) and re.search(self.only, path) is not None

    def signed(self, path: str) -> str:
        """The path and query of a URL that is good for valid_s from now."""
        expires = math.ceil(time.time() + self.valid_s)
        return f"{path}?{urlencode({'X-Amz-Signature': self._signature(path, expires), 'Expires': expires})}"

    def wrong_in(self, path: str, query: str) -> str:
        """What is wrong with a signed URL, or ""."""
        asked = {name: values[-1] for name, values in parse_qs(query).items()}
        expires = int(asked["Expires"]) if asked.get("Expires", "").isdigit() else 0
        if asked.get("X-Amz-Signature") != self._signature(path, expires):
            return "SignatureDoesNotMatch"
        return "ExpiredToken" if time.time() >= expires else ""

    def _signature(self, path: str, expires: int) -> str:
        return self.secret + hmac.digest(self.secret.encode(), f"{path} {expires}".encode(), hashlib.sha256).hex()[:16]
