"""Which sounds are said, in order: a CRDNN and the CTC loss."""

from __future__ import annotations

import sys

from samples import Recorded, run

import speechbrain as sb


class CTC(Recorded):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, lens = batch.sig
        if stage == sb.Stage.TRAIN and hasattr(self.hparams, "augment"):
            wavs, lens = self.hparams.augment(wavs, lens)
        feats = self.modules.normalize(self.hparams.compute_features(wavs), lens)
        return self.hparams.log_softmax(self.modules.output(self.modules.crdnn(feats))), lens

    def compute_objectives(self, predictions, batch, stage):
        probabilities, lens = predictions
        phones, phone_lens = batch.phn_encoded
        if stage == sb.Stage.TRAIN and hasattr(self.hparams, "augment"):
            phones, phone_lens = map(self.hparams.augment.replicate_labels, (phones, phone_lens))
        if stage != sb.Stage.TRAIN:
            said = sb.decoders.ctc_greedy_decode(probabilities, lens, blank_id=0)
            self.errors.append(batch.id, said, phones, target_len=phone_lens)
        return self.hparams.ctc_cost(probabilities, phones, lens, phone_lens)

    def on_stage_start(self, stage, epoch=None):
        self.errors = self.hparams.per_stats()

    def more_stats(self, stage):
        return {"PER": float(self.errors.summarize("error_rate"))}


if __name__ == "__main__":
    run(CTC, sys.argv[1:])
