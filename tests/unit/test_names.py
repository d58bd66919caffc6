"""What a name stands for: which folders hold weights that can be streamed, and how to convert the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowmem_load.errors import CheckpointError
from lowmem_load.hf.names import check_weights


@pytest.mark.parametrize(
    ("files", "use_safetensors", "text"),
    [
        (["model.safetensors"], None, None),
        (["pytorch_model.bin"], None, None),
        (["pytorch_model.bin"], False, None),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], None, None),
        (["model.safetensors", "pytorch_model.bin", "tf_model.h5"], None, None),
        (["model.safetensors", "pytorch_model.bin"], False, None),
        (["model.safetensors"], False, "use_safetensors=False, but it holds only safetensors"),
        (["pytorch_model.bin"], True, "use_safetensors=True, but it holds only pytorch_model"),
        (["config.json", "training_args.bin"], None, "holds no weights at all"),
        (["x-q4.gguf"], None, 'it holds x-q4.gguf. Convert once with .*gguf_file="x-q4.gguf"'),
        (["tf_model.h5"], None, "it holds tf_model.h5. Convert once with .*from_tf=True"),
        (["model.ckpt.index"], None, "from_tf=True"),
        (["flax_model.msgpack"], None, "from_flax=True"),
        (["consolidated.00.pth"], None, "the script that came with the model"),
    ],
)
def test_folders_without_weights_to_stream_are_refused(
    tmp_path: Path, files: list[str], use_safetensors: bool | None, text: str | None
) -> None:
    for file in files:
        (tmp_path / file).write_bytes(b"")
    if text is None:
        check_weights(str(tmp_path), "", use_safetensors)
        return
    with pytest.raises(CheckpointError, match=text):
        check_weights(str(tmp_path), "", use_safetensors)
