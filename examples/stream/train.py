"""Tell four kinds of waves apart, which come as a stream and are augmented at random.

    python train.py hparams.yaml                                        one process
    torchrun --standalone --nproc_per_node=2 train.py hparams.yaml      two
    python crash.py                                                     killed in the middle, and started again

All three train the same network, the last one with the same bits as the first.
"""  # noqa: E501

import math
import os
import signal

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset

import ddpkit
from ddpkit.metrics import Accuracy

# In float32 the loss would end at 0.33 or at 0.34, by rounding alone: on another kind of CPU, or
# number of processes. So small a network is as fast in float64.
torch.set_default_dtype(torch.float64)

TIME = torch.linspace(0, 6 * math.pi, 64)  # three periods
KINDS = (
    torch.sin(TIME),
    torch.sin(TIME).sign(),
    torch.asin(torch.sin(TIME)) * 2 / math.pi,
    (TIME / math.pi) % 2 - 1,
)


def recorded(number):
    """Return a recording, which is the same whenever it is read, and the kind of its wave."""
    chance = torch.Generator().manual_seed(number)
    kind, start = (int(torch.randint(most, (), generator=chance)) for most in (4, 64))
    return KINDS[kind].roll(start) + 0.3 * torch.randn(64, generator=chance), kind


class Waves(IterableDataset):
    """Recordings one after the other, as from a file that is too large to be shuffled; in training
    with augmentation.

    The numbers of `torch.rand` (and of `random` and `numpy.random`) follow here from the seed and
    the epoch, on any number of processes and workers. There is no code for several processes:
    ddpkit divides what is yielded.
    """

    def __init__(self, numbers, augments):
        self.numbers = numbers
        self.augments = augments
        self.done = 0

    def __iter__(self):
        for number in self.numbers[self.done :]:
            self.done += 1
            wave, kind = recorded(number)
            if self.augments:
                # louder or softer, and noise
                wave = (0.5 + torch.rand(())) * wave + 0.3 * torch.randn(64)
            yield wave.unsqueeze(0), kind
        self.done = 0

    # Without these two a resumed run reads the epoch again up to where it was; with them it goes on
    # there.

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class WaveBrain(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0].to(self.device))

    def compute_objectives(self, predictions, batch, stage):
        kinds = batch[1].to(self.device)
        if stage is not ddpkit.Stage.TRAIN:
            self.accuracy.update(predictions, kinds)
        return cross_entropy(predictions, kinds)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.optimizer_step == self.hparams.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)  # nothing is cleaned up, nothing is saved

    def on_stage_start(self, stage, epoch=None):
        self.accuracy = Accuracy()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is ddpkit.Stage.TRAIN:
            self.train_stats = {"loss": stage_loss}
            return
        stats = {"loss": stage_loss, "accuracy": self.accuracy.compute()}
        self.hparams.train_logger.log_stats({"epoch": epoch}, self.train_stats, stats)
        self.checkpointer.save_and_keep_only(meta=stats)


def main():
    hparams_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(hparams_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)

    brain = WaveBrain(
        hparams["modules"],
        hparams["opt_class"],
        hparams,
        run_opts,
        hparams["checkpointer"],
    )
    loading = {"num_workers": hparams["num_workers"]}
    result = brain.fit(
        hparams["epoch_counter"],
        Waves(range(1000), augments=True),
        Waves(range(1000, 1400), augments=False),
        train_loader_kwargs=loading,
        valid_loader_kwargs={"batch_size": 50, **loading},
    )
    if result.epochs and ddpkit.if_main_process():
        print(
            f"{result.optimizer_steps} optimizer steps in all; valid loss {result.valid_loss:.4f}"
        )


if __name__ == "__main__":
    main()
