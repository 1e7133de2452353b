"""Which sounds are said, in order: a recurrent network with the CTC loss, batches by length, and a
pretrained layer.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from hyperpyyaml import load_hyperpyyaml

import speechbrain as sb
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.dataio.sampler import DynamicBatchSampler
from speechbrain.utils.distributed import run_on_main


class Phones(sb.core.Brain):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        frames, lengths = batch.frames
        hidden, _ = self.modules.rnn(
            self.modules.normalize(self.modules.project(frames), lengths),
            lengths=lengths,
        )
        return self.hparams.log_softmax(self.modules.output(hidden)), lengths

    def compute_objectives(self, predictions, batch, stage):
        log_probabilities, lengths = predictions
        phones, phone_lengths = batch.phones_encoded
        loss = sb.nnet.losses.ctc_loss(
            log_probabilities,
            phones,
            lengths,
            phone_lengths,
            self.hparams.blank_index,
            reduction="mean",
        )
        if stage != sb.core.Stage.TRAIN:
            sequences = sb.decoders.ctc_greedy_decode(
                log_probabilities,
                lengths,
                self.hparams.blank_index,
            )
            self.per_metrics.append(
                batch.id,
                sequences,
                phones,
                None,
                phone_lengths,
                self.encoder.decode_ndim,
            )
        return loss

    def on_stage_start(self, stage, epoch=None):
        if stage != sb.core.Stage.TRAIN:
            self.per_metrics = self.hparams.per_stats()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == sb.core.Stage.TRAIN:
            self.train_stats = {"loss": stage_loss, "steps": self.optimizer_step}
            return
        stats = {"loss": stage_loss, "PER": self.per_metrics.summarize("error_rate")}
        if stage == sb.core.Stage.VALID:
            old_lr, new_lr = self.hparams.lr_annealing(stats["PER"])
            sb.nnet.schedulers.update_learning_rate(self.optimizer, new_lr)
            self.hparams.train_logger.log_stats(
                {"epoch": epoch, "lr": old_lr},
                self.train_stats,
                stats,
            )
            self.checkpointer.save_and_keep_only(
                meta={"PER": stats["PER"]},
                min_keys=["PER"],
                num_to_keep=2,
            )
        else:
            self.hparams.train_logger.log_stats({"epoch": "test"}, test_stats=stats)

    def on_evaluate_start(self, max_key=None, min_key=None):
        super().on_evaluate_start(max_key, min_key)
        checkpoints = self.checkpointer.find_checkpoints(min_key=min_key, max_key=max_key)
        weights = sb.utils.checkpoints.average_checkpoints(checkpoints, recoverable_name="model")
        self.hparams.model.load_state_dict(weights, strict=True)


def prepare(folder, sizes, pretrained):
    draw = random.Random(8)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, size in sizes.items():
        phones = [[draw.choice("aeiou") for _ in range(draw.randint(2, 5))] for _ in range(size)]
        rows = {
            f"{split}{row:03}": {"phones": said, "duration": 4.0 * len(said)}
            for row, said in enumerate(phones)
        }
        Path(folder, f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
    layer = torch.nn.Linear(5, 6, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(30.0).reshape(6, 5).sin())
    torch.save({"w.weight": layer.weight.data}, pretrained)


def dataio_prep(hparams):
    encoder = sb.dataio.encoder.CTCTextEncoder()
    encoder.insert_blank(hparams["blank_index"])
    encoder.update_from_iterable("aeiou", sequence_input=False)
    encoder.expect_len(6)

    @sb.utils.data_pipeline.takes("phones")
    @sb.utils.data_pipeline.provides("frames", "phones_encoded")
    def pipeline(phones):
        shape = torch.eye(5)[[("aeiou").index(one) for one in phones]]
        yield (
            shape.repeat_interleave(4, dim=0)
            + 0.1 * torch.arange(20 * len(phones)).reshape(-1, 5).cos()
        )
        yield torch.LongTensor(encoder.encode_sequence(phones))

    splits = {
        split: DynamicItemDataset.from_json(
            f"{hparams['data_folder']}/{split}.json"
        ).filtered_sorted(sort_key="duration")
        for split in hparams["sizes"]
    }
    sb.dataio.dataset.add_dynamic_item(list(splits.values()), pipeline)
    sb.dataio.dataset.set_output_keys(list(splits.values()), ["id", "frames", "phones_encoded"])
    return splits, encoder


if __name__ == "__main__":
    hparams_file, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
    sb.utils.distributed.ddp_init_group(run_opts)
    with open(hparams_file, encoding="utf-8") as fin:
        hparams = load_hyperpyyaml(fin, overrides)
    sb.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)
    run_on_main(prepare, args=[hparams["data_folder"], hparams["sizes"], hparams["pretrained"]])
    sets, encoder = dataio_prep(hparams)
    run_on_main(hparams["pretrainer"].collect_files)
    hparams["pretrainer"].load_collected()
    brain = Phones(
        hparams["modules"],
        hparams["opt_class"],
        hparams,
        run_opts,
        hparams["checkpointer"],
    )
    brain.encoder = encoder
    batches = DynamicBatchSampler(
        sets["train"],
        **hparams["batches"],
        length_func=lambda row: row["duration"],
    )
    brain.fit(
        hparams["epoch_counter"],
        sets["train"],
        sets["valid"],
        train_loader_kwargs={"batch_sampler": batches},
        valid_loader_kwargs=hparams["valid_options"],
    )
    brain.evaluate(sets["valid"], min_key="PER", test_loader_kwargs=hparams["valid_options"])
