"""Which sounds are said, in order: a transducer, with its loss written out."""

from __future__ import annotations

import sys

import torch
from samples import Recorded, run

from speechbrain.dataio import dataio


def transducer_loss(log_probabilities, labels, frames, lengths):
    """Minus the log probability of all ways through the lattice, mean over the batch; label 0 is
    blank.

    Args:
        log_probabilities: shape ``(batch, frames, labels + 1, classes)``.
    """
    blank = log_probabilities[..., 0]
    index = labels[:, None, :, None].expand(-1, log_probabilities.shape[1], -1, -1)
    emit = log_probabilities[:, :, :-1].gather(3, index)[..., 0]
    losses = []
    for one in range(len(labels)):
        last_frame = int(frames[one])
        last_label = int(lengths[one])
        row = torch.cat([blank.new_zeros(1), emit[one, 0, :last_label].cumsum(0)])
        for frame in range(1, last_frame):
            above = row + blank[one, frame - 1, : last_label + 1]
            cells = []
            for place in range(last_label + 1):
                left = [cells[-1] + emit[one, frame, place - 1]] if cells else []
                cells.append(torch.stack([above[place], *left]).logsumexp(0))
            row = torch.stack(cells)
        losses.append(-(row[-1] + blank[one, last_frame - 1, last_label]))
    return torch.stack(losses).mean()


class Transducer(Recorded):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, lens = batch.sig
        before, _ = batch.phn_bos
        feats = self.modules.normalize(self.hparams.compute_features(wavs), lens)
        heard, _ = self.modules.encoder(feats, lengths=lens)
        said, _ = self.modules.predictor(self.modules.embedding(before))
        joint = self.modules.joint(heard.unsqueeze(2), said.unsqueeze(1))
        return self.hparams.log_softmax(self.modules.output(joint)), lens

    def compute_objectives(self, predictions, batch, stage):
        probabilities, lens = predictions
        phones, phone_lens = batch.phn_encoded
        frames = (lens * probabilities.shape[1]).round()
        mask = dataio.length_to_mask((phone_lens * phones.shape[1]).round())
        return transducer_loss(probabilities, phones, frames, mask.sum(1))


if __name__ == "__main__":
    run(Transducer, sys.argv[1:])
