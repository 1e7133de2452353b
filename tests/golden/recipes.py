"""The recipes of the golden cases, and their models: each has one thing that recipes do."""

from __future__ import annotations

import torch
from torch import nn

import ddpkit
from ddpkit.distributed import get_rank
from tests.golden.data import FEATURES

NET_SEED = 5


class Golden(ddpkit.Brain):
    """Writes down every loss; can be killed after so many optimizer steps."""

    kill_at = None

    def on_fit_start(self):
        super().on_fit_start()
        self.trace = []

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return (predictions - batch[1]).square().mean()

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.trace.append(float(loss.detach()))
        if self.kill_at is not None and self.optimizer_step >= self.kill_at:
            raise KeyboardInterrupt

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is ddpkit.Stage.TEST:
            return
        self.trace.append(float(stage_loss))
        if stage is ddpkit.Stage.VALID and self.checkpointer is not None:
            self.checkpointer.save_and_keep_only(
                meta={"loss": float(stage_loss)},
                min_keys=["loss"],
                num_to_keep=1,
            )


class SumsAndCounts(Golden):
    """The loss is a sum and what it is over."""

    def compute_objectives(self, predictions, batch, stage):
        losses = (predictions - batch[1]).square()
        return losses.sum(), len(losses)


class Tokens(Golden):
    """Samples count differently, some not at all; values are logged."""

    def compute_objectives(self, predictions, batch, stage):
        errors = (predictions - batch[1]).square()
        tokens = (4 * batch[0][:, :1].abs()).floor()
        self.log("error", errors.mean())
        self.log("large", (errors > 0.1).sum(), count=errors.numel())
        return (errors * tokens).sum(), tokens.sum()


class Branches(Golden):
    """Every other optimizer step uses only one of two branches."""

    def compute_forward(self, batch, stage):
        output = self.modules.net(batch[0])
        if stage is ddpkit.Stage.TRAIN and self.optimizer_step % 2:
            return output
        return output + self.modules.branch(batch[0])


class Unfreezing(Golden):
    """Trains the first layer from the second epoch on; the optimizer has groups with the
    parameters' names.
    """

    def init_optimizers(self):
        first, *others = self.raw_modules.net.children()
        rest = nn.ModuleDict({f"layer{number}": layer for number, layer in enumerate(others, 1)})
        groups = [
            {"params": list(first.named_parameters(prefix="first")), "lr": 0.002},
            {"params": list(rest.named_parameters()), "weight_decay": 0.05},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.optimizers_dict = {"all": self.optimizer}
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("optimizer", self.optimizer)

    def on_stage_start(self, stage, epoch=None):
        if stage is ddpkit.Stage.TRAIN:
            first = next(self.raw_modules.net.children())
            first.requires_grad_(epoch > 1)


class Adversaries(Golden):
    """Two optimizers, which step one after the other in a fit_batch of the recipe's own."""

    turn = "discriminator"

    def init_optimizers(self):
        self.optimizers_dict = {
            name: self.opt_class(module.parameters()) for name, module in self.modules.items()
        }
        if self.checkpointer is not None:
            optimizers = {f"{name}_optimizer": one for name, one in self.optimizers_dict.items()}
            self.checkpointer.add_recoverables(optimizers)

    def freeze_optimizers(self, optimizers):
        return {self.turn: optimizers[self.turn]}

    def fit_batch(self, batch):
        noise, real = batch
        generator = self.modules.generator
        discriminator = self.modules.discriminator
        self.turn = "discriminator"
        with self.training_ctx:
            fake = generator(noise)
            loss = (discriminator(real) - 1).square().mean()
            loss = loss + discriminator(fake.detach()).square().mean()
        self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        self.turn = "generator"
        discriminator.requires_grad_(False)
        with self.training_ctx:
            loss = (discriminator(fake) - 1).square().mean()
        discriminator.requires_grad_(True)
        self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        self.on_fit_batch_end(batch, fake, loss, self.should_step)
        return loss.detach()

    def compute_forward(self, batch, stage):
        return self.modules.generator(batch[0])


class SmallMemory(nn.Sequential):
    """A model for which rank 0 has no memory with more than three rows at a time."""

    def forward(self, rows):
        if self.training and len(rows) > 3 and (get_rank() or 0) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(rows)


def layers_of(case):
    """Make the layers of a net, which are the same in every case."""
    torch.manual_seed(NET_SEED)
    norm = [nn.BatchNorm1d(8)] if case.norm else []
    return [nn.Linear(FEATURES, 8), *norm, nn.Tanh(), nn.Dropout(case.dropout), nn.Linear(8, 1)]


def one_net(case):
    return {"net": nn.Sequential(*layers_of(case))}


def frozen_first_layer(case):
    modules = one_net(case)
    modules["net"][0].requires_grad_(False)
    return modules


def small_memory(case):
    return {"net": SmallMemory(*layers_of(case))}


def two_branches(case):
    return {"net": nn.Sequential(*layers_of(case)), "branch": nn.Linear(FEATURES, 1)}


def generator_and_discriminator(case):
    torch.manual_seed(NET_SEED)
    return {
        "generator": nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)),
        "discriminator": nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)),
    }
