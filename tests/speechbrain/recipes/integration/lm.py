"""Which sound comes next: a recurrent language model."""

from __future__ import annotations

import sys

from samples import Recorded, run

from speechbrain import nnet


class LM(Recorded):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        return self.hparams.log_softmax(self.modules.model(batch.phn_bos.data))

    def compute_objectives(self, predictions, batch, stage):
        after, lens = batch.phn_eos
        loss = nnet.losses.nll_loss(predictions, after, length=lens)
        if not self.hparams.sum_and_count:
            return loss
        count = (lens * after.shape[1]).round().sum()  # ddpkit's form of a mean over tokens
        return loss * count, count

    def fit_batch(self, batch):
        loss = super().fit_batch(batch)
        if self.step % 2 == 0:
            self.hparams.lr_annealing(self.optimizer)
        return loss


if __name__ == "__main__":
    run(LM, sys.argv[1:])
