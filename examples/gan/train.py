"""A generator learns to make points near eight centres, and a discriminator to tell them from real
ones.

    python train.py hparams.yaml                                        one process
    torchrun --standalone --nproc_per_node=2 train.py hparams.yaml      two

Two optimizers take turns in a fit_batch of the recipe's own.
"""

import math

import torch
from torch.utils.data import Dataset

import ddpkit
from ddpkit.metrics import Mean

# In a game of two a difference in the last digit grows: in float32 to some percent of the result
# within these epochs, so that one could not see that two processes train as one does. Two such
# small networks are as fast in float64.
torch.set_default_dtype(torch.float64)

CENTRES = torch.tensor([[math.cos(math.pi * n / 4), math.sin(math.pi * n / 4)] for n in range(8)])


class Points(Dataset):
    """Noise for the generator, and a real point. They are drawn here, for each sample, and not in
    fit_batch.

    So they follow from the seed, the epoch and the sample, and are the same on any number of
    processes.
    """

    def __init__(self, size, noise_size):
        self.size = size
        self.noise_size = noise_size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.randn(self.noise_size), CENTRES[index % 8] + 0.05 * torch.randn(2)


class Gan(ddpkit.Brain):
    turn = "discriminator"  # whose optimizer steps

    def init_optimizers(self):
        self.optimizers_dict = {
            name: self.opt_class(module.parameters()) for name, module in self.modules.items()
        }
        if self.checkpointer is not None:  # as in the processes of --check_parity
            self.checkpointer.add_recoverables(
                {f"{name}_optimizer": one for name, one in self.optimizers_dict.items()}
            )

    def freeze_optimizers(self, optimizers):
        return {self.turn: optimizers[self.turn]}

    def fit_batch(self, batch):
        noise, real = (part.to(self.device) for part in batch)
        generator = self.modules.generator
        discriminator = self.modules.discriminator

        self.turn = "discriminator"
        with self.training_ctx:
            fake = generator(noise)
            loss = (discriminator(real) - 1).square().mean() + discriminator(
                fake.detach()
            ).square().mean()
        self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        self.discriminator_loss.update(loss.detach(), len(real))

        self.turn = "generator"
        discriminator.requires_grad_(False)  # its gradients must not wait for its next turn
        with self.training_ctx:
            loss = (discriminator(fake) - 1).square().mean()
        discriminator.requires_grad_(True)
        self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        return loss.detach()

    def compute_forward(self, batch, stage):
        return self.modules.generator(batch[0].to(self.device))

    def compute_objectives(self, predictions, batch, stage):
        """For validation: how far made points are from the nearest centre."""
        self.made.extend(predictions)
        return torch.cdist(predictions, CENTRES.to(self.device)).min(dim=1).values.mean()

    def on_stage_start(self, stage, epoch=None):
        self.discriminator_loss = Mean()
        self.made = []

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is ddpkit.Stage.TRAIN:
            self.train_stats = {
                "generator": stage_loss,
                "discriminator": self.discriminator_loss.compute(),
            }
            return
        # those of all processes, in the order of the set, on each
        points = torch.stack(self.gather(self.made))
        nearest = torch.cdist(points, CENTRES).min(dim=1)
        reached = nearest.indices[nearest.values < 0.2].unique().numel()
        stats = {"distance": stage_loss, "centres": reached}
        self.hparams.train_logger.log_stats({"epoch": epoch}, self.train_stats, stats)
        self.checkpointer.save_and_keep_only(meta=stats, min_keys=["distance"])
        self.last = (
            f"{reached} of 8 centres are reached; points are {stage_loss:.3f} from the nearest on "
            "average"
        )


def main():
    hparams_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(hparams_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)

    brain = Gan(
        hparams["modules"],
        hparams["opt_class"],
        hparams,
        run_opts,
        hparams["checkpointer"],
    )
    result = brain.fit(
        hparams["epoch_counter"],
        Points(hparams["samples_per_epoch"], hparams["noise_size"]),
        Points(512, hparams["noise_size"]),
        train_loader_kwargs={"shuffle": True},
        valid_loader_kwargs={"batch_size": 128},
    )
    if result.epochs and ddpkit.if_main_process():
        print(brain.last)


if __name__ == "__main__":
    main()
