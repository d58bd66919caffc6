"""`lowmem-load doctor`: where the ranks of a running job are."""

import json

import pytest

from lowmem_load.cli.start import app
from lowmem_load.errors import ConfigError


def test_a_store_that_is_none_is_an_error() -> None:
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        app(["doctor", "--store", "node1"], standalone_mode=False)


def test_the_steps_of_a_job_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    beat = {"who": "pid 7 on node1", "step": "0123/5", "title": "tiny: reading", "seconds": 12.3}
    seen = [{"prefix": "lowmem_load", "rank": 1, "silent": True, "does": "while tiny: reading", **beat}]
    monkeypatch.setattr("lowmem_load.distributed.channel.look_into", lambda host, port: seen)
    assert not app(["doctor", "--store", "node1:29500"], standalone_mode=False)
    assert "tiny: reading" in capsys.readouterr().out
    assert not app(["doctor", "--store", "node1:29500", "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)[0]["title"] == "tiny: reading"
