"""A plain supervised fine-tuning loop over a DeepSpeed engine: train, checkpoint, resume, save as one HF folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from data_engine import DataEngine

from lowmem_load.llamafactory import DistributedInterface


@dataclass(frozen=True)
class TrainingArguments:
    """The training part of the YAML file; names and meanings are LLaMA-Factory v1's.

    Attributes:
        resume_from_checkpoint: a folder that `SFTTrainer.fit` wrote, "auto" for the last one in output_dir (or none
            where there is none yet), or None.
    """

    output_dir: str
    train_dataset: str
    cutoff_len: int = 2048
    micro_batch_size: int = 1
    global_batch_size: int = 8
    max_steps: int = 10
    learning_rate: float = 1e-4
    max_grad_norm: float = 1.0
    seed: int = 42
    save_steps: int = 0
    resume_from_checkpoint: str | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrainingArguments:
        """Return the arguments in `values`: the keys that are not the model engine's."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(values.keys() - known)
        if unknown:
            raise ValueError(f"unknown key(s) {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return cls(**values)


class SFTTrainer:
    """Trains the model of a `ModelEngine`.

    Collective: all ranks construct one and call its methods.
    """

    def __init__(self, args: TrainingArguments, engine: Any, dataset: DataEngine) -> None:
        self.args, self.dataset, self.processor = args, dataset, engine.processor
        self.distributed = DistributedInterface()
        per_micro_step = args.micro_batch_size * self.distributed.world_size
        self.num_micro_batches, rest = divmod(args.global_batch_size, per_micro_step)
        if rest or not self.num_micro_batches:
            raise ValueError(f"global_batch_size {args.global_batch_size} is not a multiple of {per_micro_step}")
        ds_config = {
            **engine.ds_config,
            "train_micro_batch_size_per_gpu": args.micro_batch_size,
            "gradient_accumulation_steps": self.num_micro_batches,
            "train_batch_size": args.global_batch_size,
            "gradient_clipping": args.max_grad_norm,
            # torch_adam: DeepSpeed would have to compile its own
            "optimizer": {"type": "AdamW", "params": {"lr": args.learning_rate, "torch_adam": True}},
        }
        self.model = engine.model
        self.engine, *_ = deepspeed.initialize(model=engine.model, config=ds_config)

    def fit(self) -> list[float]:
        """Train up to max_steps, from the checkpoint to resume from if there is one; return this run's losses."""
        losses = []
        for step in range(self._resume(), self.args.max_steps):
            losses.append(self._step(step))
            if self.args.save_steps and (step + 1) % self.args.save_steps == 0:
                self.engine.save_checkpoint(
                    self.args.output_dir, tag=f"checkpoint-{step + 1}", client_state={"step": step + 1}
                )
        return losses

    def save_model(self) -> None:
        """Write output_dir/final: weights, configuration and tokenizer, as plain `from_pretrained` reads them."""
        folder = Path(self.args.output_dir) / "final"
        state_dict = self._gathered_state_dict()
        if self.distributed.rank == 0:
            self.model.save_pretrained(folder, state_dict=state_dict)
            self.processor.save_pretrained(folder)
        self.distributed.barrier()

    def _step(self, step: int) -> float:
        batches = self.dataset.micro_batches(
            step,
            seed=self.args.seed,
            rank=self.distributed.rank,
            world_size=self.distributed.world_size,
            micro_batch_size=self.args.micro_batch_size,
            num_micro_batches=self.num_micro_batches,
        )
        total = torch.zeros((), device=self.engine.device)
        for batch in batches:
            loss = self.engine(**{name: tensor.to(self.engine.device) for name, tensor in batch.items()}).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach().float()
        torch.distributed.all_reduce(total)
        return total.item() / (len(batches) * self.distributed.world_size)

    def _resume(self) -> int:
        """Load the checkpoint to resume from; return the steps done before."""
        asked = self.args.resume_from_checkpoint
        if asked is None or (asked == "auto" and not (Path(self.args.output_dir) / "latest").is_file()):
            return 0
        folder, tag = (self.args.output_dir, None) if asked == "auto" else (Path(asked).parent, Path(asked).name)
        path, client_state = self.engine.load_checkpoint(str(folder), tag=tag)
        if path is None:
            raise ValueError(f"no checkpoint to resume from in {asked}")
        return int(client_state["step"])

    def _gathered_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole weights on rank 0 (empty elsewhere), gathered one at a time. Collective."""
        names: dict[int, list[str]] = {}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, parameter in parameters.items():
            names.setdefault(id(parameter), []).append(name)
        gathered = {name: tensor for name, tensor in self.model.state_dict().items() if name not in parameters}
        for same in names.values():
            with deepspeed.zero.GatheredParameters([parameters[same[0]]]):
                whole = parameters[same[0]].detach().cpu().clone() if self.distributed.rank == 0 else None
            if whole is not None:
                gathered.update(dict.fromkeys(same, whole))
        return gathered if self.distributed.rank == 0 else {}
