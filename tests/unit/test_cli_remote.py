"""Subcommands of checkpoints at URLs and on the Hub: the answers of a local folder, and no downloads."""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lowmem_load.cli.start import main
from lowmem_load.files import object_store
from lowmem_load.files.remote_file import HEAD_BYTES
from tests import builders
from tests.ranks import reserved_port, run_command
from tests.remote.hub_front import hub_front
from tests.remote.range_server import RangeServer, range_server

Answer = Callable[..., tuple[int, Any]]
SIZES = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 2000}
"""Of a checkpoint of 1 MB, of which headers are little."""


@pytest.fixture(autouse=True)
def scratch_in_the_tests_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def checkpoint(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(builders.tiny_llama(checkpoints, max_shard_size="400KB", **SIZES), tmp_path / "llama"))


@pytest.fixture
def server(checkpoint: Path) -> Iterator[RangeServer]:
    with range_server({"models/llama": checkpoint, "bucket": checkpoint.parent}) as found:
        yield found


@pytest.fixture(params=["http", "s3"])
def url(request: pytest.FixtureRequest, server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "http":
        return f"{server.url}/models/llama"
    pytest.importorskip("obstore")
    credentials = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    for name, value in {**credentials, "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setenv(name, value)
    return "s3://bucket/llama"


def sent(server: RangeServer) -> int:
    """Bytes of weights, but for the first one, by which a file is found."""
    stats = server.stats()
    found = sum(".safetensors " in line and line.endswith(" bytes=0-0") for line in stats["asked"])
    return sum(nbytes for name, nbytes in stats["path_bytes"].items() if name.endswith(".safetensors")) - found


def heads(checkpoint: Path) -> int:
    return sum(min(HEAD_BYTES, path.stat().st_size) for path in checkpoint.glob("*.safetensors"))


def test_plan_says_of_a_url_what_a_load_fetches(
    answer: Answer, url: str, checkpoint: Path, server: RangeServer
) -> None:
    assert heads(checkpoint) < sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")) / 3
    job = ("--world-size", 2, "--json")
    code, found = answer("plan", url, *job)
    assert code == 0 and found["name"] == url
    assert sent(server) == heads(checkpoint)
    local = answer("plan", checkpoint, *job)[1]
    assert found["costs"]["needed_bytes"] == local["costs"]["needed_bytes"] > 0
    assert found["about"]["requests to the store"].endswith(" by a node, apart from those for small files")
    assert "requests to the store" not in local["about"]


def test_answers_and_errors_of_urls_have_no_secrets(
    answer: Answer, url: str, server: RangeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = url
    if url.startswith("http"):
        secret = url.replace("://", "://user:pass%2Fword@", 1) + "?X-Amz-Signature=signature"
    secrets = ("pass%2F", "user:", "signature")
    for options in ((), ("--json",)):
        code, found = answer("plan", secret, "--world-size", 2, *options)
        assert code == 0 and url in str(found)
        assert not [each for each in secrets if each in str(found)], found

    monkeypatch.setattr(object_store, "PATIENCE_S", 0.2)
    server.set(gone=True, repeats=True)
    monkeypatch.setattr(sys, "argv", ["lowmem-load", "plan", secret, "--world-size", "2"])
    with pytest.raises(SystemExit) as ended:
        main()
    text = capsys.readouterr().err
    assert ended.value.code == 3
    assert text.startswith(f"lowmem-load: {url}") and "refuses access" in text and text.count("\n") == 1
    assert not [each for each in secrets if each in text]


SCRIPT = """
import sys
import torch
import transformers
from transformers.integrations import HfDeepSpeedConfig

alive = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
print(model.config.name_or_path, sum(parameter.ds_tensor.double().sum().item() for parameter in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--no-download"], pytest.param([], marks=pytest.mark.release)])
def test_run_streams_models_on_the_hub_if_it_is_told_to(options: list[str], checkpoint: Path, tmp_path: Path) -> None:
    with hub_front({"org/model": checkpoint}) as hub, reserved_port() as port:
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        own = {"HF_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
        run = run_command(
            [sys.executable, "-m", "lowmem_load", "run", *options, "--", sys.executable, "-c", SCRIPT, "org/model"],
            **{**rank, **own, **hub.environment},
        )
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = sum(parameter.double().sum().item() for parameter in model.parameters())
    name, total = run.stdout.split()[-2:]
    assert name == "org/model" and float(total) == pytest.approx(expected, rel=1e-9)
    assert "lowmem_load: org/model: rank 0 of 1\n" in run.stderr
    assert "\n  read: " in run.stderr, run.stderr[-3000:]
    kept = [path for path in (tmp_path / "home").rglob("*.safetensors") if path.stat().st_size]
    assert bool(kept) is not bool(options)
