"""
A small llama, trained by the Trainer of transformers on pdrun: the same losses on any number of
workers.

    python examples/trainer_fit.py
    pdrun --devices 2 examples/trainer_fit.py --level 3

Needs transformers and accelerate. The model has no weights of others, so nothing is downloaded.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import pdrun
from pdrun.integrations.transformers import ParallelTrainer


def make_rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Return texts of 24 tokens that count up from another number each."""
    starts = torch.randint(64, (count,), generator=torch.Generator().manual_seed(1))
    rows = [(start + torch.arange(24)) % 64 for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a llama with transformers' Trainer.")
    parser.add_argument("--level", type=int, default=1, help="optimizer level, 0 to 3")
    args = parser.parse_args()
    context = pdrun.init()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    trainer = ParallelTrainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir="trainer-output",
            per_device_train_batch_size=16 // context.world_size,
            num_train_epochs=3,
            learning_rate=1e-2,
            logging_strategy="epoch",
            eval_strategy="epoch",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=context.device == "cpu",
        ),
        train_dataset=make_rows(64),
        eval_dataset=make_rows(13),
        compute_metrics=lambda found: {
            "right": float((found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]).mean())
        },
        parallel={"optimizer_level": args.level},
    )
    trainer.train()
    if context.is_main:
        for entry in trainer.state.log_history:
            if "eval_loss" in entry:
                print(f"epoch {entry['epoch']:.0f}  loss {entry['eval_loss']:.6f}")


if __name__ == "__main__":
    main()
