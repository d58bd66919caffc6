"""What people do with a loaded model under ZeRO-3 works: generate, resize, LoRA, layer drop, from_config."""

from pathlib import Path

import deepspeed
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Wav2Vec2Config, Wav2Vec2ForCTC
from transformers.integrations import HfDeepSpeedConfig

from lowmem_load import FallbackWarning, UnsupportedError, get_load_report, install, load_model
from lowmem_load.distributed.process_group import DistributedInterface
from lowmem_load.engines.parameters import is_partitioned
from lowmem_load.integrations.install import streaming
from tests import builders
from tests.parity import FP32, losses_of_engine
from tests.ranks import run_ranks

TOKENS = torch.randint(3, 100, (2, 10), generator=torch.Generator().manual_seed(1))


def generate_and_resize(path: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = plain.generate(TOKENS, max_new_tokens=5, do_sample=False)
    plain.resize_token_embeddings(140, mean_resizing=False)
    model = load_model(path, FP32)
    engine, *_ = deepspeed.initialize(model=model, config=FP32)
    num_tokens = 5 if torch.distributed.get_rank() == 0 else 2  # the others wait for the longest sequence
    generated = engine.module.generate(TOKENS.to(engine.device), max_new_tokens=num_tokens, do_sample=False)
    assert torch.equal(generated.cpu(), expected[:, : generated.shape[1]])
    engine.destroy()
    model = load_model(path, FP32)
    model.resize_token_embeddings(140, mean_resizing=False)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        embedding = model.get_input_embeddings().weight.detach().clone()
    assert embedding.shape == (140, 32)
    assert torch.equal(embedding[:128].cpu(), plain.get_input_embeddings().weight[:128])
    assert model.config.vocab_size == 140


def lora_losses(path: str, ours: bool) -> list[float]:
    from peft import LoraConfig, get_peft_model

    DistributedInterface()
    model = load_model(path, FP32) if ours else AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(7)
    modules = ["q_proj", "v_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM", init_lora_weights=True)
    model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).reshape(parameter.shape))
    return losses_of_engine(model, FP32)


def use(path: str) -> None:
    generate_and_resize(path)
    ordinary, ours = (lora_losses(path, is_ours) for is_ours in (False, True))
    assert ours == ordinary
    assert ours[-1] < ours[0]


def test_generate_resize_and_lora(checkpoints: Path) -> None:
    run_ranks(use, str(builders.tiny_llama(checkpoints, torch.float32)), timeout_s=120)


def drop_layers(path: str) -> None:
    """Rank function: each rank draws which layers it leaves out; it has to gather their weights nevertheless."""
    config = {**FP32, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    engine, *_ = deepspeed.initialize(model=load_model(path, config).train(), config=config)
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(4):
        assert engine(torch.randn(1, 400, device=engine.device)).logits.isfinite().all()


def test_encoders_that_drop_layers_do_so_alike_on_all_ranks(tmp_path: Path) -> None:
    convolution = {"conv_dim": (16,), "conv_stride": (5,), "conv_kernel": (10,), "num_feat_extract_layers": 1}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = Wav2Vec2Config(**sizes, **convolution, **positions, vocab_size=20, layerdrop=0.5)
    Wav2Vec2ForCTC(config).save_pretrained(tmp_path)
    run_ranks(drop_layers, str(tmp_path))


def from_config() -> list[float]:
    """Rank function: a random model that is never whole; returns the sums of its parameters."""
    DistributedInterface()
    config = LlamaConfig(
        hidden_size=320,
        intermediate_size=1280,
        num_hidden_layers=10,
        num_attention_heads=8,
        vocab_size=8000,
        tie_word_embeddings=False,
    )
    with streaming(FP32):  # what is imported on first use is not what is measured
        small = AutoModelForCausalLM.from_config(
            LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        )
    torch.manual_seed(int(DistributedInterface().rank))
    with streaming(FP32):
        model = AutoModelForCausalLM.from_config(config)
    report = get_load_report(model)
    grown = report.peak_memory.anonymous_bytes
    # this rank's half (42 MiB), the largest parameter (10 MiB), and small change
    assert grown < 4 * sum(parameter.ds_numel for parameter in model.parameters()) / 2 + (18 << 20)
    assert all(is_partitioned(parameter) for parameter in model.parameters())
    assert model.training
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        sums = [parameter.double().sum().item() for parameter in model.parameters()]
        assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    losses_of_engine(small, FP32, steps=1)
    return sums


def test_from_config_is_random_partitioned_and_equal_on_all_ranks() -> None:
    first, second = run_ranks(from_config, timeout_s=120)
    assert first == second


def build_from_own_constructor() -> None:
    """Rank function: a parameter that `_init_weights` does not know keeps the constructor's value, or is an error."""

    class Scaled(PreTrainedModel):
        config_class = LlamaConfig

        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.linear = torch.nn.Linear(4, 4)
            self.gamma = torch.nn.Parameter(torch.full((4,), 0.5))
            self.post_init()

    DistributedInterface()
    with pytest.raises(UnsupportedError, match="_init_weights of Scaled sets no value for gamma, "), streaming(FP32):
        Scaled._from_config(LlamaConfig())
    config = HfDeepSpeedConfig(FP32)
    install()
    with pytest.warns(FallbackWarning, match="_init_weights of Scaled"):
        model = Scaled._from_config(LlamaConfig())
    with deepspeed.zero.GatheredParameters([model.gamma]):
        assert model.gamma.tolist() == [0.5] * 4
    del config


def test_from_config_keeps_what_a_constructor_sets() -> None:
    run_ranks(build_from_own_constructor)
