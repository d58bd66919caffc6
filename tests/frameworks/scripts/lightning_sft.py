"""Lightning's own loop under DeepSpeedStrategy, the model loaded in `configure_model`; `--lora` trains an adapter."""

import json
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CUDAAccelerator
from pytorch_lightning.strategies import DeepSpeedStrategy
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq
from transformers.integrations import HfDeepSpeedConfig

CONFIG = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1_000_000}, "train_micro_batch_size_per_gpu": 2}


class OnCpu(CUDAAccelerator):
    """CPU ranks that DeepSpeedStrategy takes for GPUs: it refuses all else."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def setup(self, trainer: pl.Trainer) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return list(range(devices))

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cpu", 0) for _ in devices]


class OnCpuStrategy(DeepSpeedStrategy):
    """Does not ask for the numbers of the devices, which CPUs have none of."""

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Model(pl.LightningModule):
    def configure_model(self) -> None:
        """Load the model; Lightning calls this inside a `deepspeed.zero.Init`."""
        if hasattr(self, "model"):
            return
        self.ds_config = HfDeepSpeedConfig(CONFIG)
        self.model = AutoModelForCausalLM.from_pretrained("model")
        if "--lora" in sys.argv:
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(0)
            lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            self.model = get_peft_model(self.model, lora, autocast_adapter_dtype=False)

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def rows(tokenizer: Any) -> list[dict[str, list[int]]]:
    found = []
    for line in Path("data/sft.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        ids = tokenizer(row["prompt"] + row["completion"])["input_ids"]
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": ids})
    return found


def main() -> None:
    pl.seed_everything(0)
    tokenizer = AutoTokenizer.from_pretrained("model")
    batches = torch.utils.data.DataLoader(
        rows(tokenizer), batch_size=2, collate_fn=DataCollatorForSeq2Seq(tokenizer), num_workers=0
    )
    model = Model()
    trainer = pl.Trainer(
        accelerator=OnCpu(),
        devices=2,
        strategy=OnCpuStrategy(config=CONFIG, process_group_backend="gloo"),
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, batches)
    save(trainer, model)


def save(trainer: pl.Trainer, model: Model) -> None:
    """Gather what was trained, one parameter at a time, and write it on rank 0."""
    import deepspeed

    gathered = {}
    for name, parameter in model.model.named_parameters():
        if parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter]):
                gathered[name] = parameter.detach().clone()
    if trainer.is_global_zero:
        from safetensors.torch import save_file

        Path("output").mkdir()
        save_file(gathered, "output/model.safetensors")


if __name__ == "__main__":
    main()
