"""Which sound is said when: hidden Markov states, trained by the forward algorithm or on the best
path so far.
"""

from __future__ import annotations

import sys

import samples

import speechbrain.nnet.losses
from speechbrain.core import Stage


class Aligner(samples.Recorded):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, lens = batch.sig
        feats = self.modules.normalize(self.hparams.compute_features(wavs), lens)
        hidden, _ = self.modules.encoder(feats, lengths=lens)
        return self.hparams.log_softmax(self.modules.output(hidden)), lens

    def compute_objectives(self, predictions, batch, stage):
        probabilities, lens = predictions
        phones, phone_lens = batch.phn_encoded
        aligner = self.hparams.aligner
        words = (phones, phone_lens)
        if self.hparams.algorithm == "forward":
            return -aligner(probabilities, lens, *words, "forward").mean()
        before = aligner.get_prev_alignments(batch.id, probabilities, lens, *words)
        loss = speechbrain.nnet.losses.nll_loss(probabilities, before, length=lens)
        _, paths = aligner(probabilities.detach(), lens, *words, "viterbi")
        if stage == Stage.TRAIN:
            aligner.store_alignments(batch.id, paths)
        return loss


if __name__ == "__main__":
    samples.run(Aligner, sys.argv[1:])
