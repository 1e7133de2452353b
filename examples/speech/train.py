"""Recognise vowels in recordings of different lengths, with CTC.

    python train.py hparams.yaml                                        one process
    torchrun --standalone --nproc_per_node=2 train.py hparams.yaml      two

The recordings are made here: sums of harmonics, with formants and noise. hparams.yaml is as in a
recipe of SpeechBrain.
"""

import torch
from features import lengths_of
from torch.nn.functional import ctc_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from vowels import recordings

import ddpkit
from ddpkit.batch import PaddedBatch

# In float32 the loss of the last epoch would differ from one kind of CPU to another, by rounding
# alone.
torch.set_default_dtype(torch.float64)


class Recognizer(ddpkit.Brain):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, wav_lens = batch.sig  # padded, and which part of each row is real, from 0 to 1
        frames = self.hparams.compute_features.frames(lengths_of(wav_lens, wavs.shape[1]))
        features = self.hparams.normalize(self.hparams.compute_features(wavs), frames)
        found = self.modules.convolution(features.transpose(1, 2)).relu().transpose(1, 2)
        # packed: from right to left, too, it begins with what is real
        packed = pack_padded_sequence(found, frames.cpu(), batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.modules.encoder(packed)[0], batch_first=True)
        return self.modules.head(states).log_softmax(2), frames

    def compute_objectives(self, predictions, batch, stage):
        log_probs, frames = predictions
        tokens, token_lens = batch.to(self.device).tokens
        counts = lengths_of(token_lens, tokens.shape[1])
        loss = ctc_loss(
            log_probs.transpose(0, 1),
            tokens,
            frames,
            counts,
            blank=self.hparams.blank_index,
            reduction="sum",
        )
        if stage is not ddpkit.Stage.TRAIN:
            said = [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]
            heard = [
                decoded(row[:length], self.hparams.blank_index)
                for row, length in zip(log_probs.argmax(2), frames, strict=True)
            ]
            wrong = sum(map(edit_distance, heard, said))
            self.log("error", wrong, count=int(counts.sum()))
        # not the mean: batches have different numbers of vowels
        return loss, counts.sum()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        logger = self.hparams.train_logger
        if stage is ddpkit.Stage.TRAIN:
            self.train_stats = {"loss": stage_loss}
            return
        stats = {"loss": stage_loss, "error": self.logged["error"]}
        if stage is ddpkit.Stage.VALID:
            logger.log_stats({"epoch": epoch}, self.train_stats, stats)
            self.checkpointer.save_and_keep_only(meta=stats, min_keys=["error"])
        else:
            logger.log_stats({"epoch": self.hparams.epoch_counter.current}, test_stats=stats)
            self.test_error = stats["error"]


def decoded(best, blank):
    """Return the tokens of the best path: without repetitions, then without blanks."""
    return [token for token in torch.unique_consecutive(best).tolist() if token != blank]


def edit_distance(heard, said):
    """Count the insertions, deletions and substitutions between two lists."""
    row = list(range(len(said) + 1))
    for number, token in enumerate(heard, start=1):
        before, row[0] = row[0], number
        for place, other in enumerate(said, start=1):
            cost = min(row[place] + 1, row[place - 1] + 1, before + (token != other))
            before, row[place] = row[place], cost
    return row[-1]


def main():
    hparams_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(hparams_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)

    # every process makes all of them, the same: the seeds are in the calls
    sound = {"sample_rate": hparams["sample_rate"], "noise": hparams["noise"]}
    train, valid, test = (
        recordings(size, seed, **sound) for size, seed in ((300, 1), (60, 2), (60, 3))
    )
    brain = Recognizer(
        hparams["modules"],
        hparams["opt_class"],
        hparams,
        run_opts,
        hparams["checkpointer"],
    )
    brain.hparams.compute_features.to(brain.device)
    evaluation = {"batch_size": 30, "collate_fn": PaddedBatch}
    brain.fit(
        hparams["epoch_counter"],
        train,
        valid,
        train_loader_kwargs={"shuffle": True, "collate_fn": PaddedBatch},
        valid_loader_kwargs=evaluation,
    )
    brain.evaluate(test, min_key="error", test_loader_kwargs=evaluation)
    if ddpkit.if_main_process():
        print(f"{100 * brain.test_error:.1f} % of the vowels of the test are wrong")


if __name__ == "__main__":
    main()
