"""Which of four words is said: filterbanks, an encoder and a classifier, as recipes for spoken
commands have them.
"""

from __future__ import annotations

import math
import sys

import torch
from hyperpyyaml import load_hyperpyyaml
from prepare import prepare

import speechbrain as sb
from speechbrain.utils.distributed import if_main_process, run_on_main
from speechbrain.utils.logger import get_logger

logger = get_logger(__name__)


class Keywords(sb.Brain):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, lengths = batch.sig
        features = self.modules.mean_var_norm(self.modules.compute_features(wavs), lengths)
        return self.modules.classifier(self.modules.encoder(features).mean(dim=1, keepdim=True))

    def compute_objectives(self, predictions, batch, stage):
        words, _ = batch.word_encoded
        loss = sb.nnet.losses.nll_loss(predictions, words)
        if stage != sb.Stage.TRAIN:
            self.error_metrics.append(batch.id, predictions, words)
        return loss

    def on_stage_start(self, stage, epoch=None):
        if stage != sb.Stage.TRAIN:
            self.error_metrics = self.hparams.error_stats()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == sb.Stage.TRAIN:
            self.train_loss = stage_loss
            return
        stats = {"loss": stage_loss, "error": self.error_metrics.summarize("average")}
        if stage == sb.Stage.VALID:
            old_lr, new_lr = self.hparams.lr_annealing(stats["error"])
            sb.nnet.schedulers.update_learning_rate(self.optimizer, new_lr)
            self.hparams.train_logger.log_stats(
                {"epoch": epoch, "lr": old_lr},
                train_stats={"loss": self.train_loss},
                valid_stats=stats,
            )
            self.checkpointer.save_and_keep_only(meta=stats, min_keys=["error"])
        else:
            self.hparams.train_logger.log_stats(
                {"Epoch loaded": self.hparams.epoch_counter.current},
                test_stats=stats,
            )
            if if_main_process():
                with open(self.hparams.error_file, "w", encoding="utf-8") as file:
                    self.error_metrics.write_stats(file)


def dataio_prep(hparams):
    encoder = sb.dataio.encoder.CategoricalEncoder()

    @sb.utils.data_pipeline.takes("length", "phase", "tone")
    @sb.utils.data_pipeline.provides("sig")
    def audio_pipeline(length, phase, tone):
        steps = (torch.arange(length) + 7 * phase) / 16000
        return torch.sin(2 * math.pi * (300 + 200 * tone) * steps) + 0.3 * torch.sin(
            900 * (1 + phase % 5) * steps
        )

    @sb.utils.data_pipeline.takes("word")
    @sb.utils.data_pipeline.provides("word", "word_encoded")
    def label_pipeline(word):
        yield word
        yield encoder.encode_label_torch(word)

    datasets = {
        split: sb.dataio.dataset.DynamicItemDataset.from_json(
            json_path=f"{hparams['data_folder']}/{split}.json",
            dynamic_items=[audio_pipeline, label_pipeline],
            output_keys=["id", "sig", "word_encoded"],
        )
        for split in hparams["sizes"]
    }
    encoder.load_or_create(
        path=f"{hparams['save_folder']}/words.txt",
        from_didatasets=[datasets["train"]],
        output_key="word",
    )
    return datasets


if __name__ == "__main__":
    hparams_file, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
    sb.utils.distributed.ddp_init_group(run_opts)
    with open(hparams_file, encoding="utf-8") as fin:
        hparams = load_hyperpyyaml(fin, overrides)
    sb.create_experiment_directory(
        experiment_directory=hparams["output_folder"],
        hyperparams_to_save=hparams_file,
        overrides=overrides,
    )
    run_on_main(prepare, kwargs={"folder": hparams["data_folder"], "sizes": hparams["sizes"]})
    data = dataio_prep(hparams)
    brain = Keywords(
        modules=hparams["modules"],
        opt_class=hparams["opt_class"],
        hparams=hparams,
        run_opts=run_opts,
        checkpointer=hparams["checkpointer"],
    )
    brain.fit(
        brain.hparams.epoch_counter,
        data["train"],
        data["valid"],
        train_loader_kwargs=hparams["dataloader_options"],
        valid_loader_kwargs=hparams["dataloader_options"],
    )
    brain.evaluate(data["valid"], min_key="error", test_loader_kwargs=hparams["dataloader_options"])
    logger.info("The best error was found in epoch %s", hparams["epoch_counter"].current)
