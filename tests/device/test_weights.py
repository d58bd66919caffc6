"""`iter_weights` to consumers with streams of their own."""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from lowmem_load import iter_weights
from lowmem_load.weights_out.send import name_tensor_pairs
from tests.ranks import SIMULATED, run_ranks


def take_on_two_streams() -> list[str]:
    """Rank function: takes tensors as vLLM's packed producer does. Returns the names of those that are wrong."""
    from tests.device import simulated

    dist.init_process_group("simccl", store=dist.HashStore(), rank=0, world_size=1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).to("sim")
    wanted = {name: tensor.cpu() for bucket in iter_weights(model) for name, tensor in bucket}
    simulated.set_speed(0.01)
    earlier = torch.zeros(4 << 20, dtype=torch.uint8).pin_memory()
    to = torch.empty_like(earlier, device="sim")
    streams = [torch.sim.Stream() for _ in range(2)]
    wrong = []
    for bucket_bytes in (1 << 30, 5000):
        pairs, found = name_tensor_pairs(iter_weights(model, bucket_bytes=bucket_bytes)), {}
        for number in range(len(wanted)):
            streams[number % 2].synchronize()
            with streams[number % 2]:
                if number == 0:
                    to.copy_(earlier, non_blocking=True)
                name, tensor = next(pairs)
                found[name] = torch.zeros_like(tensor)
                found[name].copy_(tensor, non_blocking=True)
                del tensor
        torch.sim.synchronize()
        assert next(pairs, None) is None and found.keys() == wanted.keys()
        wrong += [name for name, tensor in found.items() if not torch.equal(tensor.cpu(), wanted[name])]
    return wrong


def test_consumers_may_take_tensors_on_any_stream() -> None:
    assert run_ranks(take_on_two_streams, world_size=1, timeout_s=100, env=SIMULATED) == [[]]
