"""A recipe of a minute's thousandth: it logs all that a page shows, and can be told to fail."""

from __future__ import annotations

import time

import torch

import ddpkit


class Line(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        time.sleep(self.hparams.pause)
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        loss = (predictions - batch[1]).square().mean()
        self.log("half", loss / 2, per_step=True)
        return loss

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is ddpkit.Stage.VALID:
            stats = {"loss": stage_loss}
            self.hparams.train_logger.log_stats({"epoch": epoch}, valid_stats=stats)
            self.checkpointer.save_and_keep_only(meta=stats, min_keys=["loss"], num_to_keep=1)
            if epoch == self.hparams.fails_in_epoch:
                raise ValueError("<b>this epoch</b> was told to fail")


def samples(number):
    x = torch.randn(number, 8, generator=torch.Generator().manual_seed(number))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def main():
    file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], file, overrides)
    brain = Line(
        hparams["modules"],
        hparams["opt_class"],
        hparams,
        run_opts,
        hparams["checkpointer"],
    )
    sizes = {"batch_size": 4}
    brain.fit(
        hparams["counter"],
        samples(1200),
        samples(40),
        train_loader_kwargs=sizes,
        valid_loader_kwargs=sizes,
    )
    brain.evaluate(samples(40), min_key="loss", test_loader_kwargs=sizes)


if __name__ == "__main__":
    main()
