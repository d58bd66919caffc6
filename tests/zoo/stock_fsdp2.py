"""Show tensors that transformers' sharded loading gives other values than its plain loading. Needs no lowmem_load.

    torchrun --nproc-per-node 2 tests/zoo/stock_fsdp2.py nomic_bert

The checkpoint has fused weights, which a converter of transformers splits. The sharded load cuts each tensor of the
files along dim 0 first, and splits what is left.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModel
from transformers.distributed import DistributedConfig

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_type", nargs="?", default="nomic_bert", help="or gte")
    model_type = parser.parse_args().model_type
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        AutoModel.from_config(AutoConfig.for_model(model_type, **SMALL)).save_pretrained(folder[0])
    dist.barrier()
    plain = AutoModel.from_pretrained(folder[0]).state_dict()
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    sharded, info = AutoModel.from_pretrained(folder[0], distributed_config=config, output_loading_info=True)
    wrong = []
    for name, tensor in sharded.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        if not torch.equal(whole.cpu(), plain[name]):
            wrong.append(name)
    if dist.get_rank() == 0:
        print(f"{model_type}: {len(wrong)} of {len(plain)} tensors differ from the plain load: {wrong}")
        print(f"what transformers says of it: {dict(info)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
