"""The same as a Brain. The weights are those of train.py, to the last bit.

    python with_brain.py hparams.yaml                                        one process
    torchrun --standalone --nproc_per_node=2 with_brain.py hparams.yaml      two

hparams.yaml says what is trained, for both scripts.
"""

from spirals import spirals
from torch.nn.functional import cross_entropy

import ddpkit
from ddpkit.metrics import Accuracy


class Spirals(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0].to(self.device))

    def compute_objectives(self, predictions, batch, stage):
        arms = batch[1].to(self.device)
        self.accuracy.update(predictions, arms)
        return cross_entropy(predictions, arms)

    def on_stage_start(self, stage, epoch=None):
        self.accuracy = Accuracy()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is ddpkit.Stage.TRAIN:
            self.train_loss = stage_loss
            return
        stats = {"loss": stage_loss, "accuracy": self.accuracy.compute()}
        self.hparams.train_logger.log_stats({"epoch": epoch}, {"loss": self.train_loss}, stats)
        self.checkpointer.save_and_keep_only(meta=stats, max_keys=["accuracy"])


def main():
    hparams_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(hparams_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)

    brain = Spirals(
        {"net": hparams["net"]},
        hparams["opt_class"],
        hparams,
        run_opts,
        hparams["checkpointer"],
    )
    brain.fit(
        hparams["epoch_counter"],
        spirals(1000, seed=1),
        spirals(300, seed=2),
        train_loader_kwargs={"shuffle": True},
        valid_loader_kwargs={"batch_size": hparams["evaluation_batch_size"]},
    )


if __name__ == "__main__":
    main()
