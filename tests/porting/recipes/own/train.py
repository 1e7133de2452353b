"""A recipe that needs nothing of SpeechBrain but its training core."""

from __future__ import annotations

import sys

import torch
from hyperpyyaml import load_hyperpyyaml

import speechbrain as sb
from speechbrain.dataio.sampler import ReproducibleRandomSampler
from speechbrain.utils.distributed import if_main_process, run_on_main
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)


class Lines(torch.utils.data.Dataset):
    """y = 2x + 1."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        x = torch.tensor([index / 12])
        return x, 2 * x + 1


class Regression(sb.core.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0].to(self.device))

    def compute_objectives(self, predictions, batch, stage):
        return torch.nn.functional.mse_loss(predictions, batch[1].to(self.device))

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == sb.Stage.TRAIN:
            self.train_loss = stage_loss
        elif stage == sb.Stage.VALID:
            self.hparams.train_logger.log_stats(
                {"epoch": epoch}, train_stats={"loss": self.train_loss}, valid_stats={"loss": stage_loss}
            )
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])


def prepare(folder):
    from speechbrain.utils.distributed import get_rank

    logger.info("preparing %s on rank %s", folder, get_rank())


if __name__ == "__main__":
    hparams_file, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
    sb.utils.distributed.ddp_init_group(run_opts)
    with open(hparams_file) as fin:
        hparams = load_hyperpyyaml(fin, overrides)
    sb.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)
    run_on_main(prepare, kwargs={"folder": hparams["output_folder"]})
    train_set = Lines()
    hparams["train_dataloader_opts"]["sampler"] = ReproducibleRandomSampler(train_set)
    brain = Regression(
        modules=hparams["modules"],
        opt_class=hparams["opt_class"],
        hparams=hparams,
        run_opts=run_opts,
        checkpointer=hparams["checkpointer"],
    )
    brain.fit(
        hparams["epoch_counter"],
        train_set,
        Lines(),
        train_loader_kwargs=hparams["train_dataloader_opts"],
        valid_loader_kwargs=hparams["valid_dataloader_opts"],
    )
    loss = brain.evaluate(Lines(), min_key="loss", test_loader_kwargs=hparams["valid_dataloader_opts"])
    if if_main_process():
        print(f"test loss {loss:.4f} by {type(brain).__mro__[1].__module__}")
