"""Every checkpoint format passes the shipped contract."""

import io
from collections.abc import Mapping

import safetensors.torch
import torch

from lowmem_load.files.format import CheckpointFormat
from lowmem_load.files.safetensors import Safetensors
from lowmem_load.files.torch_zip import TorchZip
from tests.kits.format import FormatContract


class TestSafetensors(FormatContract):
    def format(self) -> CheckpointFormat:
        return Safetensors()

    def encode(self, tensors: Mapping[str, torch.Tensor]) -> bytes:
        return safetensors.torch.save(dict(tensors))


class TestTorchZip(FormatContract):
    def format(self) -> CheckpointFormat:
        return TorchZip()

    def encode(self, tensors: Mapping[str, torch.Tensor]) -> bytes:
        file = io.BytesIO()
        torch.save(dict(tensors), file)
        return file.getvalue()
