"""SentenceTransformerTrainer over mean-pooled states; `--lora` trains an adapter."""

import sys
from pathlib import Path

from datasets import load_dataset
from safetensors.torch import save_file
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)


def main() -> None:
    args = SentenceTransformerTrainingArguments(  # before the model: it makes ZeRO-3 active
        output_dir="output",
        deepspeed="ds_z3.json",
        per_device_train_batch_size=4,
        max_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    transformer = models.Transformer("./model")
    model = SentenceTransformer(modules=[transformer, models.Pooling(transformer.get_word_embedding_dimension())])
    if "--lora" in sys.argv:
        from peft import LoraConfig, TaskType

        model.add_adapter(LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type=TaskType.FEATURE_EXTRACTION))
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=load_dataset("json", data_files="data/sft.jsonl", split="train"),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    if "--lora" in sys.argv:
        trainer.save_model("output")
        return
    # SentenceTransformerTrainer ignores the gathered weights: by default it saves tensors of shape [0], and lowmem_load
    # refuses to.
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if trainer.is_world_process_zero():
        Path("output").mkdir(exist_ok=True)
        save_file({name: value.contiguous() for name, value in state.items()}, "output/model.safetensors")


if __name__ == "__main__":
    main()
