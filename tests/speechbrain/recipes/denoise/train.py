"""Takes noise out of signals, with a critic: two optimizers, a step of its own, nominal epochs, and
a stopper.
"""

from __future__ import annotations

import sys

import torch
from hyperpyyaml import load_hyperpyyaml
from torch.utils.data import Dataset

import speechbrain
from speechbrain.core import Brain, Stage
from speechbrain.dataio.dataloader import make_dataloader
from speechbrain.nnet.losses import mse_loss
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks


@register_checkpoint_hooks
class Remembered:
    """What the recipe keeps of its own."""

    def __init__(self):
        self.losses = []

    @mark_as_saver
    def save(self, path):
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join(map(repr, self.losses)))

    @mark_as_loader
    def load(self, path, end_of_epoch):
        with open(path, encoding="utf-8") as file:
            self.losses = [float(line) for line in file]


class Noisy(Dataset):
    """Signals of one length, clean and with the same noise in every epoch."""

    def __init__(self, size, length):
        steps = torch.arange(length) / length
        rows = torch.arange(1.0, size + 1).unsqueeze(1)
        self.clean = torch.sin(6.0 * rows.sqrt() * steps)
        self.noisy = self.clean + 0.3 * torch.sin(7919.0 * rows * steps)

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, index):
        return {"noisy": self.noisy[index], "clean": self.clean[index]}


class Denoise(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.generator(batch["noisy"].to(self.device).unsqueeze(1)).squeeze(1)

    def compute_objectives(self, predictions, batch, stage):
        loss = mse_loss(predictions, batch["clean"].to(self.device))
        if stage == Stage.TRAIN:
            loss = loss + 0.01 * (1 - self.modules.critic(predictions)).square().mean()
        return loss

    def critic_loss(self, predictions, batch):
        real = self.modules.critic(batch["clean"].to(self.device))
        return ((1 - real).square() + self.modules.critic(predictions.detach()).square()).mean()

    def fit_batch(self, batch):
        predictions = self.compute_forward(batch, Stage.TRAIN)
        self.critic_optimizer.zero_grad()
        self.critic_loss(predictions, batch).backward()
        self.critic_optimizer.step()
        loss = self.compute_objectives(predictions, batch, Stage.TRAIN)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.optimizer_step += 1
        self.hparams.noam(self.optimizer)
        return loss.detach().cpu()

    def init_optimizers(self):
        self.optimizer = self.hparams.opt_class(self.modules.generator.parameters())
        self.critic_optimizer = self.hparams.opt_class(self.modules.critic.parameters())
        self.optimizers_dict = {
            "optimizer": self.optimizer,
            "critic_optimizer": self.critic_optimizer,
        }
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("optimizer", self.optimizer)
            self.checkpointer.add_recoverable("critic_optimizer", self.critic_optimizer)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == Stage.TRAIN:
            self.train_loss = stage_loss
        elif stage == Stage.VALID:
            self.hparams.remembered.losses.append(stage_loss)
            self.hparams.epoch_counter.update_metric(stage_loss)
            self.hparams.train_logger.log_stats(
                {"epoch": epoch, "steps": self.optimizer_step, "lr": self.hparams.noam.current_lr},
                train_stats={"loss": self.train_loss},
                valid_stats={"loss": stage_loss, "of": len(self.hparams.remembered.losses)},
            )
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])
        else:
            self.hparams.train_logger.log_stats({"epoch": "test"}, test_stats={"loss": stage_loss})


if __name__ == "__main__":
    hparams_file, run_opts, overrides = speechbrain.parse_arguments(sys.argv[1:])
    speechbrain.utils.distributed.ddp_init_group(run_opts)
    with open(hparams_file, encoding="utf-8") as fin:
        hparams = load_hyperpyyaml(fin, overrides)
    speechbrain.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)
    brain = Denoise(
        modules=hparams["modules"],
        hparams=hparams,
        run_opts=run_opts,
        checkpointer=hparams["checkpointer"],
    )
    brain.fit(
        hparams["epoch_counter"],
        Noisy(hparams["size"], hparams["length"]),
        make_dataloader(Noisy(8, hparams["length"]), batch_size=4),
        train_loader_kwargs=hparams["train_options"],
    )
    brain.evaluate(
        Noisy(8, hparams["length"]),
        min_key="loss",
        test_loader_kwargs={"batch_size": 4},
    )
