"""Two voices at once are taken apart: its modules are called through ``hparams``, and it steps by
itself.
"""

from __future__ import annotations

import sys

import torch
from samples import Recorded, run

import speechbrain as sb
from speechbrain.nnet.losses import get_si_snr_with_pitwrapper


class Separation(Recorded):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        mixture = batch.sig.data + batch.other_sig.data
        net = self.modules if self.hparams.through_modules else self.hparams
        frames = net.encoder(mixture.unsqueeze(-1))
        hidden, _ = net.masker(frames)
        masks = net.masks(hidden).relu().chunk(2, dim=-1)
        voices = torch.cat([net.decoder(frames * mask) for mask in masks], dim=-1)
        return torch.nn.functional.pad(voices, (0, 0, 0, mixture.shape[1] - voices.shape[1]))

    def compute_objectives(self, predictions, batch, stage):
        voices = torch.stack([batch.sig.data, batch.other_sig.data], dim=-1)
        return get_si_snr_with_pitwrapper(voices, predictions).mean()

    def fit_batch(self, batch):
        loss = self.compute_objectives(
            self.compute_forward(batch, sb.Stage.TRAIN),
            batch,
            sb.Stage.TRAIN,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.modules.parameters(), 5.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().cpu()


if __name__ == "__main__":
    run(Separation, sys.argv[1:])
