"""How letters are said: sequence to sequence on text."""

from __future__ import annotations

import sys

from samples import Recorded, run

import speechbrain


class G2P(Recorded):
    def compute_forward(
        self,
        batch: speechbrain.dataio.batch.PaddedBatch,
        stage: speechbrain.Stage,
    ):
        batch = batch.to(self.device)
        letters, lens = batch.char_encoded
        before, _ = batch.phn_bos
        read, _ = self.modules.encoder(self.modules.letters(letters), lengths=lens)
        decoded, _ = self.modules.decoder(self.modules.phones(before), read, lens)
        return self.hparams.log_softmax(self.modules.output(decoded))

    def compute_objectives(self, predictions, batch, stage):
        after, lens = batch.phn_eos
        return speechbrain.nnet.losses.nll_loss(
            predictions,
            after,
            length=lens,
            label_smoothing=0.1,
        )


if __name__ == "__main__":
    run(G2P, sys.argv[1:])
