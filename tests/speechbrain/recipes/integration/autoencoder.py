"""Features through a bottleneck and back."""

from __future__ import annotations

import sys

from samples import Recorded, run

import speechbrain as sb
import speechbrain.utils.checkpoints as ckpts


class Autoencoder(Recorded):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, lens = batch.sig
        feats = self.modules.normalize(self.hparams.compute_features(wavs), lens)
        return feats, self.modules.decoder(self.modules.encoder(feats).tanh()), lens

    def compute_objectives(self, predictions, batch, stage):
        feats, decoded, lens = predictions
        return self.hparams.cost(decoded, feats, length=lens)

    def on_evaluate_start(self, max_key=None, min_key=None):
        super().on_evaluate_start(max_key, min_key)
        found = self.checkpointer.find_checkpoints(
            max_key=max_key,
            min_key=min_key,
            max_num_checkpoints=2,
        )
        self.hparams.model.load_state_dict(ckpts.average_checkpoints(found, "model"), strict=True)

    def init_optimizers(self):
        self.optimizer = self.opt_class(self.hparams.model.parameters())
        self.optimizers_dict = {"opt_class": self.optimizer}
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("optimizer", self.optimizer)


if __name__ == "__main__":
    sb.utils.seed.seed_everything(9)
    run(Autoencoder, sys.argv[1:])
