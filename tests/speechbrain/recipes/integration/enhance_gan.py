"""Noise is taken away: a generator and a critic, with two optimizers and a ``fit_batch`` that steps
them.
"""

from __future__ import annotations

import sys

import torch
from samples import Recorded, run

import speechbrain as sb


class EnhanceGAN(Recorded):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        noisy, lens = batch.noisy_sig
        feats = self.hparams.compute_features(noisy) / 50
        mask, _ = self.modules.generator(feats, lengths=lens)
        return torch.sigmoid(mask) * feats

    def compute_objectives(self, predictions, batch, stage, wanted="generator"):
        clean, lens = batch.sig
        target = self.hparams.compute_features(clean) / 50
        if wanted == "critic":
            real, fake = (
                self.modules.critic(torch.cat([target, predictions.detach()])).mean((1, 2)).chunk(2)
            )
            return ((real - 1) ** 2 + fake**2).mean()
        error = sb.nnet.losses.mse_loss(predictions, target, lens)
        return error + 0.1 * ((self.modules.critic(predictions).mean((1, 2)) - 1) ** 2).mean()

    def fit_batch(self, batch):
        predictions = self.compute_forward(batch, sb.Stage.TRAIN)
        loss = self.compute_objectives(predictions, batch, sb.Stage.TRAIN, "critic")
        loss.backward()
        self.critic_optimizer.step()
        self.zero_grad()
        loss = self.compute_objectives(predictions, batch, sb.Stage.TRAIN)
        loss.backward()
        self.generator_optimizer.step()
        self.zero_grad()
        return loss.detach()

    def init_optimizers(self):
        self.generator_optimizer = self.hparams.generator_class(self.modules.generator.parameters())
        self.critic_optimizer = self.hparams.critic_class(self.modules.critic.parameters())
        self.optimizers_dict = {
            "generator": self.generator_optimizer,
            "critic": self.critic_optimizer,
        }
        self.checkpointer.add_recoverable("generator_optimizer", self.generator_optimizer)
        self.checkpointer.add_recoverable("critic_optimizer", self.critic_optimizer)


if __name__ == "__main__":
    run(EnhanceGAN, sys.argv[1:])
