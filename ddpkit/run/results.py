"""What the Brain hands out for every sample: gathered results, and predictions."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.comm import agreement
from ddpkit.control.rank_status import POSITION
from ddpkit.distributed import exchange, get_world_size, if_main_process
from ddpkit.errors import BatchError, ConfigError, RunStopped
from ddpkit.metrics import begin_stage
from ddpkit.reporting.progress import ProgressBar
from ddpkit.run.beginning import Beginning
from ddpkit.training.gathering import Seen, gather_results, is_divided, on_cpu, row_count, rows_of
from ddpkit.training.stages import StopsOfEvaluation, compared, counts_of, length_of
from ddpkit.types import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BAR_SECONDS = 1.0


class Results(Beginning):
    """The half of the Brain that knows of single samples; :class:`~ddpkit.brain.Brain` runs the stages.

    Ranks: collective.

    Example:
        >>> issubclass(Results, Beginning)
        True
    """

    on_evaluate_start: Callable[..., None]
    profiler: Any
    _bar_enabled: Callable[[bool | None], bool]

    def gather(self, results: Any) -> Any:
        """Give every rank the results of the last stage, every sample's once, in dataset order.

        A recipe collects what it computes for each sample, batch by batch, on its rank, and gathers it in
        ``on_stage_end`` or after :meth:`~ddpkit.brain.Brain.evaluate`. The order is that of the indices in the
        dataset, whatever order a sampler or shuffling has given them, and so does not depend on the number of ranks.

        A sample that a sampler has drawn twice comes twice, in the order in which the batches came. Where the
        sampler's indices are no numbers, results come in the order of the batches. A stream's come in its own order
        where it is dealt out by counting, and else (shards, a stream that divides itself, a loader of which only the
        batches are known) rank by rank; nobody can check that they are complete. After a resume in the middle of an
        epoch they are those of the batches since.
        A sample repeated to keep step, which counts nothing in training, is left out; the recipe may have done so
        itself.

        Args:
            results: one entry per sample this rank has seen, in the order it saw them: a list of anything that
                pickles (strings, dicts, tensors of any length), or a tensor or an array with that first dimension. Or
                one entry per batch: a list of tensors, arrays or lists with as many rows as their batch has samples;
                where both fit, the entries are taken for samples (with one sample per batch on every rank). Or a dict
                or a tuple of such.

        Returns:
            The same form, one entry per sample of all ranks, tensors on the CPU. What was one tensor on every rank is
            one tensor, or a list if the other dimensions differ.

        Raises:
            ConfigError: the stage still runs, the results are no such thing, or nobody knows what was seen.
            DataError: not one entry per sample. On every rank.
            LaunchError: in main-only code, where the other ranks' part would be missing.

        Ranks: collective where the stage's data was divided (training; evaluation with ``shard_evaluation``), else
        local. Call it on every rank. Every rank then holds the results of all.
        """
        if self.progress.seen is None:
            raise ConfigError(
                "gather was called before any stage has run: there are no samples that the results could belong to. "
                "Call it in on_stage_end, or after fit or evaluate."
            )
        return gather_results(self.progress.seen, results)

    def predict_batch(self, batch: Any) -> Any:
        """Compute the outputs of a batch for :meth:`predict`; called without gradients. Override it at will.

        Args:
            batch: as the loader yields it.

        Returns:
            Outputs with one row per sample of the batch: a tensor or an array with that first dimension, a list of
            that length, or a tuple or a dict of such.
        """
        return self.compute_forward(batch, Stage.TEST)

    def predict(
        self,
        data: Any,
        max_key: str | None = None,
        min_key: str | None = None,
        progressbar: bool | None = None,
        loader_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Recover a checkpoint, run the model over a dataset, and return the output for every sample.

        The set is divided over all ranks, whatever ``shard_evaluation`` says. The hooks ``on_stage_start`` and
        ``on_stage_end`` are not called, since there is no loss; :meth:`predict_batch` is. With ``debug`` only
        ``debug_batches`` batches are run. Every batch is a step: ``hang_timeout`` is for a single one, and asked to
        stop, all ranks end within about a second and a batch.

        Args:
            data: dataset or loader.
            max_key: take the checkpoint with the highest value of this key.
            min_key: take the checkpoint with the lowest; without either, the newest.
            progressbar: None asks the option ``noprogressbar``.
            loader_kwargs: for :meth:`~ddpkit.run.loaders.Loaders.make_dataloader`; not changed.

        Returns:
            One output per sample, in dataset order, on every rank, with tensors on the CPU. With ``batch_size=None``,
            where the dataset makes whole batches, one output per item. Of a stream, in the order of :meth:`gather`.

        Raises:
            BatchError: the output of a batch cannot be divided into those of its samples.
            ConfigError: called inside ``fit`` of a Brain with a checkpointer, where it would recover other weights.
            RunStopped: a signal or the time limit has asked for the end.

        Ranks: collective.
        """
        with self._attended("predict"):
            self._require_no_training("predict")
            kwargs = {"ckpt_prefix": None, **(loader_kwargs or {})}
            loader = agreement.together(lambda: self._divided_loader(data, kwargs))
            self._compare_data(predict=loader)
            self.on_evaluate_start(max_key=max_key, min_key=min_key)
            self.modules.eval()
            before = self.progress.seen, self.step
            self.progress.seen = Seen(Stage.TEST, loader, divided=get_world_size() > 1 and is_divided(loader))
            begin_stage(divided=self.progress.seen.divided)
            POSITION.stage_begins()
            self.step = 0
            try:
                with self._evaluated_weights(Stage.TEST):
                    outputs = self._outputs(loader, self._bar_enabled(progressbar))
                gathered: list[Any] = gather_results(self.progress.seen, outputs)
            except RunStopped as stopped:
                self._stop_in_evaluation(stopped)
                raise
            finally:
                self.progress.seen, self.step = before
            return gathered

    def _require_no_training(self, call: str) -> None:
        """Refuse what recovers a checkpoint where that would replace the weights, and the place, of a training.

        Args:
            call: such as ``"evaluate"``.

        Raises:
            ConfigError: ``fit`` of this Brain runs, and it has a checkpointer.
        """
        if self._fitting and self.checkpointer is not None:
            raise ConfigError(
                f"{call} was called inside fit: it recovers a checkpoint, which would replace the weights that are "
                "being trained, and the place in the training. Call it after fit; what is to be known of every epoch "
                "comes from a valid_set."
            )

    def _divided_loader(self, data: Any, kwargs: Mapping[str, Any]) -> Any:
        self._dividing = True
        try:
            return self._loader(data, Stage.TEST, kwargs)
        finally:
            self._dividing = False

    @torch.no_grad()
    def _outputs(self, loader: Any, enable_bar: bool) -> list[Any]:
        """Run the model over this rank's batches; return one output per sample, on the CPU."""
        counts, limit, length = counts_of(loader), self.debug_batches if self.debug else None, length_of(loader)
        makes_batches = getattr(loader, "batch_size", 0) is None and getattr(loader, "batch_sampler", None) is None
        outputs: list[Any] = []
        # An output may be wrong on one rank alone, which has to be noticed: in a collective it would be waited for.
        due, confer = time.monotonic() + BAR_SECONDS, StopsOfEvaluation(self, _added_over_store)
        total = length if limit is None or length is None else min(length, limit)
        with ProgressBar("predict", total, enable=enable_bar and if_main_process()) as bar:
            for self.step, batch in enumerate(itertools.islice(compared(loader, Stage.TEST), limit), 1):
                with self.evaluation_ctx:
                    output = on_cpu(self.predict_batch(batch))
                count = None if counts is None else counts.count(self.step - 1)
                outputs += [output] if makes_batches else self._divided_output(output, count)
                if time.monotonic() >= due:
                    due = time.monotonic() + BAR_SECONDS
                    bar.show(self.step, None, len(outputs))
                confer(self.step)
            confer.await_others()
            bar.show(self.step, None, len(outputs))
        if self.progress.seen is not None:
            self.progress.seen.close(self.step)
        return outputs

    def _divided_output(self, output: Any, count: int | None) -> list[Any]:
        rows = row_count(output)
        if rows is None or count not in {None, rows}:
            samples = "its samples" if count is None else f"its {count} sample(s)"
            raise BatchError(
                f"{type(self).__name__}.predict_batch returned {_shown(output)} for a batch, which cannot be divided "
                f"into one output for each of {samples}. Override predict_batch(self, batch): let it return a tensor "
                "whose first dimension is the samples', a list of one entry per sample, or a tuple or a dict of such."
            )
        return rows_of(output)


def _added_over_store(values: list[float]) -> list[float]:
    """Add up a few numbers over all ranks; other than in a collective, a rank that fails is not waited for."""
    return [sum(numbers) for numbers in zip(*exchange(values, site="predict"), strict=True)]


def _shown(output: Any) -> str:
    """Describe an output by its shape."""
    if hasattr(output, "shape"):
        return f"a {type(output).__name__} of shape {tuple(output.shape)}"
    if isinstance(output, list):
        return f"a list of {len(output)}"
    if isinstance(output, (tuple, dict)):
        inner = output.items() if isinstance(output, dict) else enumerate(output)
        return f"a {type(output).__name__} with " + (
            ", ".join(f"{_shown(one)} at {key!r}" for key, one in inner) or "nothing in it"
        )
    return f"a {type(output).__name__}"
