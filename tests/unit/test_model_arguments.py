"""integrations/llamafactory.py: the arguments that `ModelEngine` takes and refuses, and those of the load of v1."""

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lowmem_load.errors import ConfigError, UnsupportedError
from lowmem_load.integrations import llamafactory
from lowmem_load.integrations.llamafactory import DistConfig, ModelArguments, read_arguments
from lowmem_load.load.load import Options

DIST: dict[str, Any] = {"config_file": {"zero_optimization": {"stage": 3}}}


class Flash(enum.Enum):
    SDPA = "sdpa"


@dataclass
class TheirArguments:
    """Stands for the dataclass of another library."""

    model: str = "m"
    flash_attn: Flash = Flash.SDPA
    template: str = "llama"


def test_a_pipeline_file_is_read_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    path = tmp_path / "train.yaml"
    path.write_text(
        "model_name_or_path: m\nmodel_class: other\nflash_attn: auto\nfreeze: a.*\noutput_dir: out\nbf16: null\n"
        "dist_config: {name: deepspeed, config_file: ds.json}\n"
    )
    args, dist_config, extra = read_arguments(path)
    assert args == ModelArguments("m", "AutoModel", freeze=["a.*"])
    assert dist_config == DistConfig(str(tmp_path / "ds.json"))
    assert extra == {"output_dir": "out"}
    assert read_arguments(path, DIST)[1] == DistConfig(DIST["config_file"])
    (tmp_path / "ds.json").unlink()
    assert read_arguments(path)[1] == dist_config  # for the error that names where it should be


def test_a_dataclass_of_another_library_may_have_more_fields() -> None:
    args, dist_config, extra = read_arguments(TheirArguments(), DIST)
    assert (args, extra) == (ModelArguments("m", attn_implementation="sdpa"), {"template": "llama"})
    assert read_arguments(args, dist_config) == (args, dist_config, {})


@pytest.mark.parametrize(
    ("model_args", "dist_config", "message"),
    [
        ({"model": "m"}, None, "no dist_config: pass"),
        ({"model": ""}, DIST, "ModelArguments.model is missing"),
        ({"model": "m", "modle": 1}, DIST, r"ModelArguments: unknown key\(s\) modle; known are model, "),
        ({"model": "m", "model_kwargs": {"dtype": 1}}, DIST, "ModelArguments.model_kwargs: remove dtype; bf16"),
        ({"model": "m", "dist_config": 3}, None, "dist_config: expected a dataclass, a mapping, or the path of a YAML"),
        ({"model": "m"}, DIST["config_file"], "DistConfig: unknown key.s. zero_optimization; known are config_file"),
        ({"model": "m"}, {"name": "fsdp2"}, "DistConfig.name: expected 'deepspeed', got 'fsdp2'; for FSDP2 call "),
        ("gone", DIST, "model_args: gone: cannot be read as YAML: .*No such file"),
    ],
)
def test_unusable_arguments_are_named(model_args: Any, dist_config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_arguments(model_args, dist_config)


@pytest.mark.parametrize("values", [{"quant_config": {"bits": 4}}, {"model_class": "cls"}])
def test_requests_that_are_not_supported_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(values))):
        read_arguments({"model": "m", **values}, DIST)


def test_the_load_of_v1_follows_the_options_of_install(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(llamafactory, "load_into", lambda *_, **kwargs: asked.update(kwargs))
    [load] = llamafactory.load_handlers(Options(stream=True, share_reads="off")).values()
    load(None, None, nn.Linear(1, 1), "org/model")
    assert asked == {"download": False, "share_reads": "off"}
