"""Write a small random Llama with a byte-level tokenizer, so that the examples need neither network nor GPU.

python examples/make_model.py /tmp/tiny                 # 0.4 million parameters
python examples/make_model.py /tmp/small --size small   # 43 million, 170 MB in float32
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {
    "tiny": dict(hidden_size=64, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4),
    "mini": dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6),
    "small": dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12),
    "medium": dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, num_attention_heads=16),
}
SPECIAL = ["<pad>", "<s>", "</s>"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, and three special ones."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos)


def make(folder: Path, size: str) -> None:
    """Write the checkpoint and its tokenizer."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        **SIZES[size],
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    arguments = parser.parse_args(argv)
    make(arguments.folder, arguments.size)


if __name__ == "__main__":
    main()
