"""A language model of characters learns from a page of text.

    python train.py hparams.yaml                                        one process
    torchrun --standalone --nproc_per_node=2 train.py hparams.yaml      two

The loss is a mean over characters, not over lines: compute_objectives returns a sum and what it is
over.
"""

import math
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import ddpkit

PADDING = 0  # no character of a text


class LanguageModel(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        read = batch[:, :-1].to(self.device)
        states, _ = self.modules.memory(self.modules.embedding(read))
        return self.modules.head(states)

    def compute_objectives(self, predictions, batch, stage):
        wanted = batch[:, 1:].to(self.device)  # after each character the next one
        real = wanted != PADDING
        losses = F.cross_entropy(predictions.transpose(1, 2), wanted, reduction="none")
        # Not the mean: a process whose lines are short has fewer characters, and each must count
        # the same.
        return (losses * real).sum(), real.sum()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        stats = {"bits": stage_loss / math.log(2)}  # per character
        if stage is ddpkit.Stage.TRAIN:
            self.train_stats = {**stats, "lr": self.optimizer.param_groups[0]["lr"]}
        elif stage is ddpkit.Stage.VALID:
            self.hparams.train_logger.log_stats(
                {"epoch": epoch},
                self.train_stats,
                valid_stats=stats,
            )
            self.checkpointer.save_and_keep_only(meta=stats, min_keys=["bits"])
        else:
            self.test_bits = stats["bits"]

    @torch.no_grad()
    def continued(self, text, length, seed):
        """Go on with a text, each time with a likely character: on all processes alike."""
        modules = self.raw_modules.eval()  # without DDP
        chance = torch.Generator().manual_seed(seed)
        codes = torch.tensor([list(text.encode("ascii"))], device=self.device)
        memory = None
        while len(text) < length and not text.endswith("\n"):
            states, memory = modules.memory(modules.embedding(codes), memory)
            # twice: rather too likely than too wild
            likely = (2 * modules.head(states[0, -1])).softmax(-1).cpu()
            codes = torch.multinomial(likely, 1, generator=chance).to(self.device).unsqueeze(0)
            text += chr(codes.item())
        return text.rstrip("\n")


def lines_of(text_file):
    """Return every line, with its end, as a tensor of ASCII codes; it begins with the end of the
    line before.
    """
    lines = Path(text_file).read_text(encoding="ascii").splitlines()
    return [torch.tensor(list(f"\n{line}\n".encode("ascii"))) for line in lines]


def padded(lines):
    return pad_sequence(lines, batch_first=True, padding_value=PADDING)


def main():
    hparams_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(hparams_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)

    lines = lines_of(hparams["text_file"])
    every = hparams["valid_every"]
    valid = lines[::every]
    train = [line for number, line in enumerate(lines) if number % every]

    brain = LanguageModel(
        hparams["modules"],
        hparams["opt_class"],
        hparams,
        run_opts,
        checkpointer=hparams["checkpointer"],
        scheduler_class=hparams["scheduler_class"],
    )
    loading = {"collate_fn": padded}
    brain.fit(
        hparams["epoch_counter"],
        train,
        valid,
        train_loader_kwargs={**loading, "shuffle": True},
        valid_loader_kwargs={**loading, "batch_size": 4},
    )
    brain.evaluate(valid, min_key="bits", test_loader_kwargs={**loading, "batch_size": 4})
    # On all processes: with --strategy=fsdp each has a part of the weights, and a forward pass
    # needs them all.
    texts = [
        brain.continued(start, length=80, seed=hparams["seed"])
        for start in ("The sea", ("In the evening"))
    ]
    if ddpkit.if_main_process():
        print(
            f"{brain.test_bits:.2f} bits per character of lines that it has not read",
            *texts,
            sep="\n",
        )


if __name__ == "__main__":
    main()
