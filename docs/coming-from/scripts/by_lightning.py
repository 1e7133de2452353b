"""The training with PyTorch Lightning: `python by_lightning.py 2` for two processes."""

from __future__ import annotations

import sys

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from task import network, spirals
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Spirals(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        points, arms = batch
        return cross_entropy(self.net(points), arms)

    def validation_step(self, batch, batch_idx):
        points, arms = batch
        scores = self.net(points)
        right = (scores.argmax(1) == arms).float().mean()
        self.log("loss", cross_entropy(scores, arms), sync_dist=True)
        self.log("accuracy", right, sync_dist=True)

    def on_validation_epoch_end(self):
        values = self.trainer.callback_metrics
        self.print(f"epoch {self.current_epoch + 1}: loss {values['loss']:.4f}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main():
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    pl.seed_everything(1)
    trainer = pl.Trainer(
        max_epochs=5,
        devices=processes,
        accelerator="cpu",
        strategy="ddp" if processes > 1 else "auto",
        gradient_clip_val=1.0,
        callbacks=[
            EarlyStopping("loss", patience=3),
            ModelCheckpoint("results", monitor="loss", save_last=True),
        ],
    )
    trainer.fit(
        Spirals(),
        DataLoader(spirals(1000, seed=1), batch_size=32 // processes, shuffle=True),
        DataLoader(spirals(300, seed=2), batch_size=100),
    )


if __name__ == "__main__":
    main()
