"""Tag every character of a sequence with the number of brackets that are open there.

    python train.py hparams.yaml --grad_accumulation_factor=2           one process
    torchrun --standalone --nproc_per_node=2 train.py hparams.yaml      two

Sequences have 4 to 60 characters. Batches are of similar lengths, padded, and all of about the same
size.
"""

import random

import torch
from torch.nn.functional import cross_entropy

import ddpkit
from ddpkit.batch import PaddedBatch
from ddpkit.metrics import Accuracy
from ddpkit.sampler import DynamicBatchSampler

# In float32 the loss of the last epoch would differ from one kind of CPU to another, by rounding
# alone.
torch.set_default_dtype(torch.float64)

CHARACTERS = "_ab()"  # by their numbers; the first is padding
DEEPEST = 4


def tagged_sequences(size, seed):
    """Return texts such as `a(b(ab))` as dicts of tensors, with the depth of each character as its
    tag.
    """
    chance = random.Random(seed)
    samples = []
    for number in range(size):
        text = ""
        tags = []
        depth = 0
        for _ in range(chance.randint(4, 60)):
            character = chance.choice("ab" + "(" * 2 * (depth < DEEPEST) + ")" * 2 * (depth > 0))
            depth += {"(": 1, ")": -1}.get(character, 0)
            text += character
            tags.append(depth)
        tokens = torch.tensor([CHARACTERS.index(character) for character in text])
        samples.append({"id": number, "tokens": tokens, "tags": torch.tensor(tags)})
    return samples


class Tagger(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        states, _ = self.modules.memory(self.modules.embedding(batch.tokens.data))
        return self.modules.head(states)

    def compute_objectives(self, predictions, batch, stage):
        tags, lengths = batch.tags  # padded, and which part of each row is real, from 0 to 1
        longest = tags.shape[1]
        real = torch.arange(longest, device=self.device) < (lengths * longest).round().unsqueeze(1)
        self.accuracy.update(predictions[real], tags[real])
        losses = cross_entropy(predictions.transpose(1, 2), tags, reduction="none")
        # not the mean: batches have different numbers of characters
        return (losses * real).sum(), real.sum()

    def on_stage_start(self, stage, epoch=None):
        self.accuracy = Accuracy()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        stats = {"loss": stage_loss, "error": self.accuracy.error()}
        if stage is ddpkit.Stage.TRAIN:
            self.train_stats = stats
            return
        self.hparams.train_logger.log_stats({"epoch": epoch}, self.train_stats, stats)
        self.checkpointer.save_and_keep_only(meta=stats, min_keys=["error"])
        self.last = (
            f"{100 * stats['error']:.2f} % of the characters of the last validation have a wrong "
            "tag"
        )


def main():
    hparams_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(hparams_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)

    data = {"train": tagged_sequences(600, seed=1), "valid": tagged_sequences(200, seed=2)}
    batches = {
        name: DynamicBatchSampler(
            samples,
            hparams["max_batch_length"],
            bucket_boundaries=hparams["bucket_boundaries"],
            lengths_list=[len(sample["tokens"]) for sample in samples],
            shuffle=name == "train",
        )
        for name, samples in data.items()
    }
    brain = Tagger(
        hparams["modules"],
        hparams["opt_class"],
        hparams,
        run_opts,
        hparams["checkpointer"],
    )
    result = brain.fit(
        hparams["epoch_counter"],
        data["train"],
        data["valid"],
        train_loader_kwargs={"batch_sampler": batches["train"], "collate_fn": PaddedBatch},
        valid_loader_kwargs={"batch_sampler": batches["valid"], "collate_fn": PaddedBatch},
    )
    if result.epochs and ddpkit.if_main_process():
        print(brain.last)


if __name__ == "__main__":
    main()
