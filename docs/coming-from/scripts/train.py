"""The training as a recipe for ddpkit: `python train.py`, or torchrun ... train.py."""

from __future__ import annotations

import torch
from task import network, spirals
from torch.nn.functional import cross_entropy

import ddpkit
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.parts import EarlyStopping


class Spirals(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0].to(self.device))

    def compute_objectives(self, predictions, batch, stage):
        arms = batch[1].to(self.device)
        self.log("accuracy", (predictions.argmax(1) == arms).sum(), count=len(arms))
        return cross_entropy(predictions, arms)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is not ddpkit.Stage.VALID:
            return
        self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])
        if ddpkit.if_main_process():
            print(f"epoch {epoch}: loss {stage_loss:.4f}, accuracy {self.logged['accuracy']:.4f}")


def main():
    options = {"global_batch_size": 32, "max_grad_norm": 1.0, "shard_evaluation": True}
    ddpkit.seed_everything(1)
    ddpkit.ddp_init_group(options)
    net = network()
    epochs = EpochCounter(limit=5)
    brain = Spirals(
        {"net": net},
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        run_opts=options,
        checkpointer=Checkpointer("results/save", {"net": net, "epochs": epochs}),
        parts=[EarlyStopping(patience=3)],
    )
    brain.fit(
        epochs,
        spirals(1000, seed=1),
        spirals(300, seed=2),
        train_loader_kwargs={"shuffle": True},
        valid_loader_kwargs={"batch_size": 100},
    )


if __name__ == "__main__":
    main()
