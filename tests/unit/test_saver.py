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
from lowmem_load.models.saver import describe_save_pretrained
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


class SavesItself(nn.Linear):
    def save_pretrained(self, folder: str) -> None:
        raise AssertionError("is not to be called")


def test_what_transformers_does_not_know_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    owner = nn.Module()
    owner.projection, owner.llm = (
        nn.Linear(2, 2),
        AutoModelForCausalLM.from_pretrained(builders.tiny_llama(checkpoints)),
    )
    refused = {
        "Linear: has no save_pretrained: .* write what model.state_dict": nn.Linear(2, 2),
        "SavesItself: has a save_pretrained of its own, which takes no state_dict: ": SavesItself(2, 2),
        "Module: has no save_pretrained: .*; save the model inside of it, llm$": owner,
    }
    for text, model in refused.items():
        with pytest.raises(UnsupportedError, match=text):
            describe_save_pretrained(model, tmp_path, {}, dtype=None, max_shard_size="5GB", kwargs={})
    with pytest.raises(UnsupportedError, match="takes no state_dict"):
        save_model(SavesItself(2, 2), tmp_path / "saved")


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
