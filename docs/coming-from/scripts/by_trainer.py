"""The training with the Trainer of transformers: `torchrun --nproc_per_node=2 by_trainer.py`."""

from __future__ import annotations

import os

import torch
from task import network, spirals
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments, set_seed


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, points, labels):
        scores = self.net(points)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def collate(rows):
    points, arms = zip(*rows, strict=True)
    return {"points": torch.stack(points), "labels": torch.stack(arms)}


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(1) == prediction.label_ids).mean()}


def main():
    set_seed(1)
    arguments = TrainingArguments(
        "results",
        num_train_epochs=5,
        per_device_train_batch_size=32 // int(os.environ.get("WORLD_SIZE", "1")),
        per_device_eval_batch_size=100,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        Model(),
        arguments,
        data_collator=collate,
        train_dataset=spirals(1000, seed=1),
        eval_dataset=spirals(300, seed=2),
        compute_metrics=accuracy,
        callbacks=[EarlyStoppingCallback(3)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
