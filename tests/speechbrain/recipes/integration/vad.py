"""Is there speech: a decision for each frame."""

from __future__ import annotations

import sys

from samples import Recorded, run

from speechbrain.nnet.losses import bce_loss
from speechbrain.utils.metric_stats import BinaryMetricStats


class VAD(Recorded):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, lens = batch.sig
        feats = self.modules.normalize(self.hparams.compute_features(wavs), lens)
        hidden, _ = self.modules.encoder(feats, lengths=lens)
        return self.modules.output(hidden), lens

    def compute_objectives(self, predictions, batch, stage):
        scores, lens = predictions
        targets = batch.speech.data[:, : scores.shape[1]]
        scores = scores[:, : targets.shape[1], 0]
        self.binary.append(batch.id, scores.detach().sigmoid(), targets)
        return bce_loss(scores, targets, length=lens)

    def on_stage_start(self, stage, epoch=None):
        self.binary = BinaryMetricStats()

    def more_stats(self, stage):
        return {"F": float(self.binary.summarize(field="F-score", threshold=0.5))}


if __name__ == "__main__":
    run(VAD, sys.argv[1:])
