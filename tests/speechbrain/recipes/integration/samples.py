"""Short utterances of made-up sounds, and what the recipes of this folder do alike: the data, the
record, the run.
"""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import soundfile
import torch
from hyperpyyaml import load_hyperpyyaml

import speechbrain as sb
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.utils.data_pipeline import provides, takes
from speechbrain.utils.distributed import if_main_process, run_on_main

# samples in a second and in one sound
RATE = 8000
SOUND = 400
PITCH = {"a": 300, "b": 600, "c": 1100, "d": 1700}
SIZES = {"train": 12, "valid": 4}


def make_samples(folder, lengths):
    """Write the sounds and a list of each split; the words that are said are as long as they are
    told to be.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, size in SIZES.items():
        rows = []
        for number in range(size):
            length = 4 if lengths == "equal" else 3 + (number * 7 + len(split)) % 3
            said = [
                "abcd"[(number * 5 + place * place + len(split)) % 4] for place in range(length)
            ]
            speaker = number % 3
            row = {
                "ID": f"{split}{number:02}",
                "duration": length * SOUND / RATE,
                "phn": " ".join(said),
            }
            row |= {
                "char": " ".join(phone.upper() for phone in said),
                "spk_id": f"speaker{speaker}",
            }
            for kind, wav in zip(
                ("wav", "noisy", "other"),
                waves(said, speaker, number),
                strict=True,
            ):
                row[kind] = f"$data_root/{row['ID']}_{kind}.wav"
                soundfile.write(
                    f"{folder}/{row['ID']}_{kind}.wav",
                    wav.numpy(),
                    RATE,
                    subtype="FLOAT",
                )
            rows.append(row)
        with Path(folder, f"{split}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def waves(said, speaker, number):
    """What is said, the same with noise, and another voice."""
    time = torch.arange(len(said) * SOUND) / RATE
    pitch = torch.tensor([PITCH[phone] for phone in said]).repeat_interleave(SOUND)
    clean = (
        0.4 * (2 * math.pi * pitch * time).sin()
        + 0.1 * (1 + speaker) * (2 * math.pi * 2.1 * pitch * time).sin()
    )
    noise = 0.2 * (1e4 * (time + number).sin()).sin()
    other = 0.4 * (2 * math.pi * (170 + 40 * speaker) * time).sin() * (9 * time).cos()
    return clean, clean + noise, other


def read_samples(hparams):
    """The data sets, with everything that can be asked of an utterance; hparams say what is
    asked.
    """
    encoder = sb.dataio.encoder.CTCTextEncoder()
    encoder.insert_blank(index=0)
    encoder.update_from_iterable("abcd", sequence_input=False)
    encoder.expect_len(5)
    boundary = torch.zeros(1, dtype=torch.long)

    @takes("wav")
    @provides("sig")
    def sound(wav):
        return sb.dataio.dataio.read_audio(wav).to(torch.get_default_dtype())

    @takes("noisy", "other")
    @provides("noisy_sig", "other_sig")
    def more_sounds(noisy, other):
        yield sb.dataio.dataio.read_audio(noisy).to(torch.get_default_dtype())
        yield sb.dataio.dataio.read_audio(other).to(torch.get_default_dtype())

    @takes("phn", "char")
    @provides("phn_encoded", "phn_bos", "phn_eos", "char_encoded")
    def labels(phn, char):
        phones = encoder.encode_sequence_torch(phn.split(" "))
        yield phones
        yield torch.cat([boundary, phones])
        yield torch.cat([phones, boundary])
        yield torch.tensor(["ABCD".index(one) + 1 for one in char.split(" ")])

    @takes("phn", "spk_id")
    @provides("speech", "speaker")
    def targets(phn, spk_id):
        frames = [1.0 if phone in "ab" else 0.0 for phone in phn.split(" ")]
        yield torch.tensor(frames).repeat_interleave(SOUND // 80)
        yield torch.tensor([int(spk_id[-1])])

    sets = [
        DynamicItemDataset.from_csv(
            f"{hparams['data']}/{split}.csv",
            replacements={"data_root": hparams["data"]},
        )
        for split in SIZES
    ]
    if hparams.get("sorting") in {"ascending", "descending"}:
        sets = [
            one.filtered_sorted(sort_key="duration", reverse=hparams["sorting"] == "descending")
            for one in sets
        ]
    for item in (sound, more_sounds, labels, targets):
        sb.dataio.dataset.add_dynamic_item(sets, item)
    sb.dataio.dataset.set_output_keys(sets, ["id", *hparams["outputs"]])
    return sets


class Recorded(sb.Brain):
    """Logs the losses of each epoch, saves, and tests the best."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == sb.Stage.TRAIN:
            self.train_loss = stage_loss
            return
        stats = {"loss": stage_loss, **self.more_stats(stage)}
        if stage == sb.Stage.VALID:
            self.hparams.train_logger.log_stats({"epoch": epoch}, {"loss": self.train_loss}, stats)
            self.checkpointer.save_and_keep_only(
                meta={"loss": stage_loss},
                min_keys=["loss"],
                num_to_keep=1,
            )
        elif if_main_process():
            self.hparams.train_logger.log_stats({"epoch": "test"}, test_stats=stats)

    def more_stats(self, stage):
        return {}


def run(brain_class, words):
    """Do what is below ``if __name__ == "__main__":`` in recipes."""
    torch.set_default_dtype(getattr(torch, os.environ.get("RECIPE_DTYPE", "float32")))
    hparams_file, run_opts, overrides = sb.parse_arguments(words)
    sb.utils.distributed.ddp_init_group(run_opts)
    with open(hparams_file, encoding="utf-8") as file:
        hparams = load_hyperpyyaml(file, overrides)
    sb.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)
    run_on_main(make_samples, args=[hparams["data"], hparams["lengths"]])
    train, valid = read_samples(hparams)
    brain = brain_class(
        hparams["modules"],
        hparams.get("opt_class"),
        hparams,
        run_opts,
        hparams["checkpointer"],
    )
    options = hparams["dataloader_options"]
    brain.fit(
        hparams["epoch_counter"],
        train,
        valid,
        train_loader_kwargs=options,
        valid_loader_kwargs=options,
    )
    test = train if hparams.get("test_set") == "train" else valid
    brain.evaluate(test, min_key="loss", test_loader_kwargs=options)
