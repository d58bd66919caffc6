"""Train on a device mesh as torchtitan and verl do: build on meta, parallelize, then `load_into`; DCP resumes.

torchrun --nproc-per-node 2 examples/mesh_loop.py --model /tmp/tiny --output /tmp/out [--tp 2] [--resume] [--lora]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from common import finish, parse, read_jsonl, report, tokenize
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import lowmem_load


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut each layer over the mesh dim "tp", then shard it over "dp". It is all the same whether it has memory."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {
        **{name: ColwiseParallel() for name in columns},
        **{name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")},
    }
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if mesh["tp"].size() > 1:
            parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def load(name: str, mesh: DeviceMesh, device: str) -> nn.Module:
    """Return the model with fp32 parameters: each rank has read what its DTensors hold, and cast it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=torch.float32)
    parallelize(model, mesh)
    model.to_empty(device=device)
    lowmem_load.load_into(model, name)  # in place of verl's fsdp2_load_full_state_dict, or torchtitan's dcp.load
    return model


def load_adapted(name: str, mesh: DeviceMesh, device: str, adapt: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Do the same with a LoRA. `adapt` puts it on the model: PEFT draws it, or reads it. Rank 0's values count."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name), dtype=torch.float32)
    own = put_on_host(base)
    model = adapt(base)
    adapters = {key: parameter.detach() for key, parameter in base.named_parameters() if id(parameter) not in own}
    base.to("meta").tie_weights()  # `to` unties
    parallelize(base, mesh)
    model.to_empty(device=device)
    lowmem_load.load_into(model, name, skip=adapters)
    with torch.no_grad():
        for key, parameter in base.named_parameters():
            if key in adapters:
                whole = adapters[key].to(device)
                parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
    return model


def put_on_host(model: nn.Module) -> set[int]:
    """Replace parameters on meta by such on the host that take no memory; return their `id`s.

    PEFT makes an adapter on the device of its layer. On meta it would lose its values.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in made:  # else it is tied
                value = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                made[parameter] = nn.Parameter(value)
            setattr(module, key, made[parameter])
    return set(map(id, made.values()))


def load_by_default(
    name: str, mesh: DeviceMesh, device: str, adapt: Callable[[nn.Module], nn.Module] = lambda model: model
) -> nn.Module:
    """Do the same with all of the model on every rank. `adapt` must draw the same on all."""
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    model = adapt(base)
    parallelize(base, mesh)
    return model


def add_lora(model: nn.Module) -> nn.Module:
    """Put a LoRA on a model."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def newest(folder: Path) -> Path:
    """Return the last checkpoint that is complete: DCP writes its .metadata at the end."""
    saved = [metadata.parent for metadata in folder.glob("step-*/.metadata")]
    if not saved:
        raise FileNotFoundError(
            f"{folder}: has no complete checkpoint to resume; --save-steps says how often one is saved"
        )
    return max(saved, key=lambda each: int(each.name.partition("-")[2]))


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train and save; return the loss of each step of this run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    tp = int(arguments.pop(arguments.index("--tp") + 1)) if "--tp" in arguments else 1
    options = parse([each for each in arguments if each != "--tp"], __doc__)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (torch.distributed.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    if options.lora:
        model = (load_by_default if options.default_loader else load_adapted)(options.model, mesh, device, add_lora)
    else:
        model = (load_by_default if options.default_loader else load)(options.model, mesh, device)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)

    first_step, folder = 0, Path(options.output, "dcp")
    if options.resume:  # into a loaded model: buffers such as rotary frequencies are in no checkpoint
        state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        state["step"] = 0
        dcp.load(state, checkpoint_id=newest(folder))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first_step = state["step"]

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows, collate = [tokenize(row, tokenizer) for row in read_jsonl("sft.jsonl")], DataCollatorForSeq2Seq(tokenizer)
    losses = []
    for step in range(first_step, options.steps):
        start = 2 * (step * mesh["dp"].size() + mesh["dp"].get_local_rank()) % len(rows)
        loss = model.train()(**collate(rows[start : start + 2]).to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % options.save_steps == 0:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            # A folder for each save: a job that is killed while it saves still has the one before.
            dcp.save({**state, "step": step + 1}, checkpoint_id=folder / f"step-{step + 1}")

    lowmem_load.save_model(model, Path(options.output, "final"))  # one Hugging Face folder
    return report(losses, model)


if __name__ == "__main__":
    main()
    finish()
