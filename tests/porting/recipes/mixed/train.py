"""A recipe that needs both: a tagger of sequences, with imports of every form."""

from __future__ import annotations

import speechbrain
import speechbrain as sb
import speechbrain.dataio.dataset
import speechbrain.nnet.losses as losses
import speechbrain.utils.checkpoints as ckpts
from speechbrain import Stage, dataio
from speechbrain.core import AMPConfig, Brain
from speechbrain.core import create_experiment_directory as make_folder
from speechbrain.dataio.dataio import length_to_mask, read_audio
from speechbrain.dataio.sampler import DynamicBatchSampler, ReproducibleRandomSampler
from speechbrain.utils import data_utils, epoch_loop, seed_everything
from speechbrain.utils.distributed import (
    ddp_barrier,
    if_main_process,
    infer_device,
    run_on_main,
)
from speechbrain.utils.train_logger import (
    FileTrainLogger,
    plot_spectrogram,
)

Tagger = sb.Brain


class Recipe(Brain):
    """Named after speechbrain.core.Brain."""

    def compute_forward(self, batch, stage):
        import speechbrain.utils.epoch_loop

        assert isinstance(self.hparams.counter, speechbrain.utils.epoch_loop.EpochCounter)
        wavs, lens = batch.sig
        mask = length_to_mask(lens * wavs.shape[1])
        dtype = AMPConfig.from_name(self.precision).dtype
        return self.modules.model(wavs.to(dtype)), mask

    def compute_objectives(self, predictions, batch, stage):
        targets, lens = batch.tags
        loss = losses.nll_loss(predictions[0], targets, length=lens)
        if stage != sb.Stage.TRAIN and stage is not Stage.TRAIN:
            self.errors = data_utils.undo_padding(targets, lens)
        return loss

    def on_stage_end(self, stage, loss, epoch=None):
        if stage == speechbrain.core.Stage.VALID and if_main_process():
            self.checkpointer.save_and_keep_only(meta={"loss": loss})
        if stage == sb.core.Stage.TEST:
            best = self.checkpointer.find_checkpoints(max_num_checkpoints=2)
            sb.utils.checkpoints.average_checkpoints(best, "model")
            ckpts.torch_save(self.modules, "model.ckpt")


def load(hparams, sb_path):
    @sb.utils.data_pipeline.takes("wav")
    @sb.utils.data_pipeline.provides("sig")
    def audio(wav):
        return sb.dataio.dataio.read_audio(wav) if sb_path else read_audio(wav)

    data = sb.dataio.dataset.DynamicItemDataset.from_csv(csv_path=hparams["csv"])
    sb.dataio.dataset.add_dynamic_item([data], audio)
    other = dataio.dataset.DynamicItemDataset({})
    sampler = dataio.sampler.ConcatDatasetBatchSampler([ReproducibleRandomSampler(data)], [2])
    return data, other, sampler, DynamicBatchSampler(data, 100, num_buckets=2)


def main(run_opts, hparams):
    sb.utils.distributed.ddp_init_group(run_opts)
    seed_everything(1)
    make_folder("results")
    run_on_main(plot_spectrogram, args=[infer_device()])
    ddp_barrier()
    logger = FileTrainLogger("log.txt")
    counter = epoch_loop.EpochCounter(2)
    logger.log_stats({"epoch": counter.current, "by": "speechbrain.utils.train_logger.FileTrainLogger"})
    speechbrain.dataio.dataset.set_output_keys([], ["id"])
    Recipe({}, None, hparams, run_opts).fit(
        counter, load(hparams, "")[0], train_loader_kwargs=hparams["dataloader_options"]
    )
