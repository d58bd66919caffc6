"""Which files a save would write, and what it says of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.testing_utils import CaptureLogger
from transformers.utils import logging as hf_logging

from lowmem_load import ConfigError, UnsupportedError, save_model
from tests import builders

pytestmark = pytest.mark.usefixtures("lone_process")


def test_transformers_logs_no_folder_that_is_not_the_users(checkpoints: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(builders.tiny_llama(checkpoints))
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_info()
    loggers = [hf_logging.get_logger(f"transformers.{name}") for name in ("modeling_utils", "configuration_utils")]
    try:
        with CaptureLogger(loggers[0]) as weights, CaptureLogger(loggers[1]) as configuration:
            save_model(model, tmp_path / "saved")
            loggers[0].info("afterwards")
    finally:
        hf_logging.set_verbosity(verbosity)
    assert weights.out.split() == ["afterwards"]
    assert not configuration.out


class SavesItself(nn.Sequential):
    def save_pretrained(self, folder: str) -> None:
        raise AssertionError("is not to be called")


def test_what_transformers_does_not_know_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    llm = AutoModelForCausalLM.from_pretrained(builders.tiny_llama(checkpoints))
    text = "SavesItself: has a save_pretrained of its own, which does not take state_dict, .*; "
    for inside, todo in ((nn.Linear(2, 2), "write what model.state_dict"), (llm, "save the model inside of it, 1$")):
        with pytest.raises(UnsupportedError, match=text + todo):
            save_model(SavesItself(nn.Linear(2, 2), inside), tmp_path / "saved")


def test_a_module_without_a_save_of_its_own_is_saved_by_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    model[1].weight = nn.Parameter(model[0].weight.detach().t().contiguous())
    model.append(model[1])
    save_model(model, tmp_path / "saved", rename={"^1[.]": "one."}, dtype=torch.float16)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == {"0.weight", "0.bias", "one.weight", "one.bias"}
    assert torch.equal(saved["one.weight"], model[1].weight.half())
    with pytest.raises(ConfigError, match="variant: this module has no save_pretrained"):
        save_model(model, tmp_path / "saved", variant="fp16")
