"""A transformer learns to sort digits, each process holding as much of it as --strategy says.

python train.py hparams.yaml                                                       one process
torchrun --standalone --nproc_per_node=2 train.py hparams.yaml --strategy=zero1    two, half of the optimizer each
"""  # noqa: E501

import torch
from torch.nn import functional as F

import ddpkit

BETWEEN = 10  # the symbol after the digits, from which on they are to be sorted


class Sorting(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        question, answer = (part.to(self.device) for part in batch)
        between = torch.full_like(question[:, :1], BETWEEN)
        read = torch.cat([question, between, answer[:, :-1]], dim=1)
        # what it says from the sign between on
        return self.modules.transformer(read)[:, -answer.shape[1] :]

    def compute_objectives(self, predictions, batch, stage):
        return F.cross_entropy(predictions.transpose(1, 2), batch[1].to(self.device))

    def predict_batch(self, batch):
        """Sort without seeing the answer: one digit after the other."""
        question = batch[0]
        answer = torch.zeros_like(batch[0])
        for place in range(question.shape[1]):
            scores = self.compute_forward((question, answer), ddpkit.Stage.TEST)
            answer[:, place] = scores[:, place].argmax(-1).cpu()
        return answer

    def on_stage_end(self, stage, stage_loss, epoch=None):
        stats = {"loss": stage_loss}
        if stage is ddpkit.Stage.TRAIN:
            self.train_stats = stats
        elif stage is ddpkit.Stage.VALID:
            self.hparams.train_logger.log_stats(
                {"epoch": epoch},
                self.train_stats,
                valid_stats=stats,
            )
            # On every rank: with zero1 and fsdp each has a part of what is saved.
            self.checkpointer.save_and_keep_only(meta=stats, min_keys=["loss"])


def strings(number, digits, seed):
    """Return pairs: some digits, and the same sorted."""
    drawn = torch.randint(0, 10, (number, digits), generator=torch.Generator().manual_seed(seed))
    return list(zip(drawn, drawn.sort(dim=1).values, strict=True))


def main():
    hparams_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(hparams_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)

    train = strings(hparams["num_train"], hparams["digits"], seed=1)
    valid = strings(hparams["num_valid"], hparams["digits"], seed=2)
    brain = Sorting(
        hparams["modules"],
        hparams["opt_class"],
        hparams,
        run_opts,
        checkpointer=hparams["checkpointer"],
        scheduler_class=hparams["scheduler_class"],
    )
    brain.fit(
        hparams["epoch_counter"],
        train,
        valid,
        train_loader_kwargs={"shuffle": True},
        valid_loader_kwargs={"batch_size": 64},
    )
    questions = [(question, question) for question, _ in strings(3, hparams["digits"], seed=3)]
    answers = brain.predict(questions, min_key="loss", loader_kwargs={"batch_size": 2})
    if ddpkit.if_main_process():
        for (question, _), answer in zip(questions, answers, strict=True):
            print(*question.tolist(), "->", *answer.tolist())


if __name__ == "__main__":
    main()
