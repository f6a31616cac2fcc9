"""
A module of Lightning, trained by pdrun: the same losses on any number of workers.

    python examples/lightning_fit.py
    pdrun --devices 2 examples/lightning_fit.py --level 3

Needs lightning.
"""

import argparse
import logging

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import pdrun
from pdrun.integrations.lightning import ParallelRunStrategy


class Classifier(lightning.LightningModule):
    """Says which of three sums of inputs is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 3))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class PrintLoss(lightning.Callback):
    """Prints the loss of each validation."""

    def on_validation_end(self, trainer: lightning.Trainer, module: Classifier) -> None:
        if trainer.is_global_zero:
            print(f"step {trainer.global_step}  loss {trainer.callback_metrics['loss']:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a module of Lightning.")
    parser.add_argument("--level", type=int, default=1, help="optimizer level, 0 to 3")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    pdrun.init()
    inputs = torch.randn(220, 6)
    data = TensorDataset(inputs, inputs.view(-1, 3, 2).sum(2).argmax(1))
    trainer = lightning.Trainer(
        strategy=ParallelRunStrategy(optimizer_level=args.level),
        accelerator="auto",
        devices=1,
        max_epochs=4,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[PrintLoss()],
    )
    module = Classifier()
    trainer.fit(module, DataLoader(data, 32, shuffle=True), DataLoader(data, 50))


if __name__ == "__main__":
    main()
