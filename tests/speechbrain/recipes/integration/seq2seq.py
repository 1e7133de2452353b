"""Which sounds are said, in order: an encoder, attention and a decoder."""

from __future__ import annotations

import sys

from samples import Recorded, run

from speechbrain import Stage
from speechbrain.utils.metric_stats import ErrorRateStats


class Seq2Seq(Recorded):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, lens = batch.sig
        before, _ = batch.phn_bos
        feats = self.modules.normalize(self.hparams.compute_features(wavs), lens)
        heard, _ = self.modules.encoder(feats, lengths=lens)
        decoded, _ = self.modules.decoder(self.modules.embedding(before), heard, lens)
        probabilities = self.hparams.log_softmax(self.modules.output(decoded))
        said = self.hparams.searcher(heard, lens)[0] if stage != Stage.TRAIN else None
        return probabilities, said

    def compute_objectives(self, predictions, batch, stage):
        probabilities, said = predictions
        after, lens = batch.phn_eos
        if stage != Stage.TRAIN:
            phones, phone_lens = batch.phn_encoded
            self.errors.append(batch.id, said, phones, target_len=phone_lens)
        return self.hparams.seq_cost(probabilities, after, length=lens)

    def on_stage_start(self, stage, epoch=None):
        self.errors = ErrorRateStats()

    def more_stats(self, stage):
        return {"PER": float(self.errors.summarize("error_rate"))}


if __name__ == "__main__":
    run(Seq2Seq, sys.argv[1:])
