"""Who speaks: x-vectors, with batch norm."""

from __future__ import annotations

import sys

from samples import Recorded, run

import speechbrain as sb
from speechbrain.nnet.pooling import StatisticsPooling


class SpeakerId(Recorded):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, lens = batch.sig
        feats = self.modules.normalize(self.hparams.compute_features(wavs), lens)
        self.vectors = self.modules.xvector(feats, lens)
        return self.modules.classifier(self.vectors)

    def compute_objectives(self, predictions, batch, stage):
        speakers, lens = batch.speaker
        if stage != sb.Stage.TRAIN:
            self.errors.append(batch.id, predictions, speakers, lens)
        return sb.nnet.losses.nll_loss(predictions, speakers, lens)

    def on_fit_start(self):
        for module in self.modules.modules():
            if isinstance(module, StatisticsPooling):
                module.eps = self.hparams.pooling_noise
        super().on_fit_start()

    def on_stage_start(self, stage, epoch=None):
        self.errors = self.hparams.error_stats()

    def more_stats(self, stage):
        return {"error": float(self.errors.summarize("average"))}


if __name__ == "__main__":
    run(SpeakerId, sys.argv[1:])
