"""Are two utterances of one speaker: x-vectors, compared by a PLDA that is fitted after the
training.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from samples import run
from speaker_id import SpeakerId

from speechbrain.core import Stage
from speechbrain.processing.PLDA_LDA import PLDA, Ndx, StatObject_SB, fast_PLDA_scoring


def statistics(names, vectors):
    none = np.array([None] * len(names))
    return StatObject_SB(
        np.array(names),
        np.array(names),
        none,
        none,
        np.ones((len(names), 1)),
        vectors,
    )


class Verification(SpeakerId):
    def compute_objectives(self, predictions, batch, stage):
        if stage == Stage.TEST:
            self.names += batch.id
            self.speakers += [f"speaker{int(one)}" for one in batch.speaker.data]
            self.seen.append(self.vectors.squeeze(1).double().cpu())
        return super().compute_objectives(predictions, batch, stage)

    def on_stage_start(self, stage, epoch=None):
        super().on_stage_start(stage, epoch)
        self.names = []
        self.speakers = []
        self.seen = []

    def more_stats(self, stage):
        if stage != Stage.TEST:
            return super().more_stats(stage)
        vectors = torch.cat(self.seen).numpy()
        plda = PLDA(rank_f=2, nb_iter=2)
        plda.plda(statistics(self.speakers, vectors))
        each = statistics(self.names, vectors)
        trials = Ndx(models=each.modelset, testsegs=each.modelset)
        scores = fast_PLDA_scoring(each, each, trials, plda.mean, plda.F, plda.Sigma)
        return {"score": float(scores.scoremat.diagonal().mean())}


if __name__ == "__main__":
    run(Verification, sys.argv[1:])
