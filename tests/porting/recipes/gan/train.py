"""A recipe with two optimizers and habits of its own."""

from __future__ import annotations

import torch

import speechbrain as sb
from speechbrain.utils.distributed import if_main_process


class Gan(sb.Brain):
    max_grad_norm = 1.0

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, sb.Stage.TRAIN), batch, sb.Stage.TRAIN)
        (loss / self.grad_accumulation_factor).backward()
        if self.step % self.grad_accumulation_factor == 0:
            self.optimizer_d.step()
            self.scaler.step(self.optimizer_g)
        return loss.detach().cpu()

    def _should_save_intra_epoch_ckpt(self, last_time, steps):
        return steps > 10

    def _save(self, path):
        torch.save({}, path)

    def on_stage_end(self, stage, loss, epoch=None):
        self.scheduler.step()
        if if_main_process():
            if epoch:
                self.checkpointer.save_checkpoint()

    def make_dataloader(self, dataset, stage, **kwargs):
        return super().make_dataloader(dataset, stage, **kwargs)


if __name__ == "__main__":
    sampler = sb.dataio.sampler.DistributedSamplerWrapper(range(4), num_replicas=2, rank=0)
    train_loader = sb.dataio.dataloader.make_dataloader(range(4), sampler=sampler)
    Gan().fit(range(1), train_loader)
