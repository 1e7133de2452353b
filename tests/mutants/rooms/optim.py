"""Faults in optimizer steps, clipping, schedules, averaged weights, precision."""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

FP16 = "tests/unit/test_optim.py tests/unit/test_precision.py tests/contract/test_fp16_sums.py"
MODEL = "tests/model/test_model.py"
SCHEDULES = "tests/unit/test_optim.py tests/contract/test_schedules.py"

STEPS = in_room(
    "optim",
    "tests/unit/test_optim.py",
    [
        Fault(
            "gradients are clipped before they are unscaled",
            "unscale",
            "scaler.unscale_(optimizer)",
            "pass",
            FP16,
        ),
        Fault(
            "gradients are clipped by twice the largest norm",
            "gradient_factor",
            "(total_norm + 1e-06).reciprocal() * max_norm",
            "(total_norm + 1e-06).reciprocal() * max_norm * 2",
        ),
        Fault(
            "clipping loses the count that a window with sums is divided by",
            "gradient_factor",
            "clip if weight is None else weight * clip",
            "clip",
            "tests/unit/test_optim.py tests/contract/test_brain_gradients.py",
        ),
        Fault(
            "the norm that is clipped by is that before the division by the count",
            "take_step",
            "total_norm if weight is None else total_norm * weight",
            "total_norm",
            "tests/unit/test_optim.py tests/contract/test_brain_gradients.py",
        ),
        Fault(
            "only the gradients of the first optimizer are clipped",
            "take_step",
            "_with_norm(optimizers, norm_of_parts)",
            "_with_norm(optimizers[:1], norm_of_parts)",
            MODEL,
        ),
        Fault(
            "gradients of which each rank has a part are clipped by the norm of that part",
            "_with_norm",
            "torch.distributed.all_reduce(shared, group=found[0].device_mesh.get_group())",
            "pass",
            MODEL,
        ),
        Fault(
            "an epoch that a resumed run ends without a step warns of its schedule",
            "Schedule.after_stage",
            "warnings.filterwarnings('ignore', NO_STEP_BEFORE)",
            "pass",
            SCHEDULES,
        ),
        Fault(
            "a step is taken with gradients that are not finite",
            "result_of_norm",
            "0.0 <= norm < math.inf",
            "norm >= 0.0 or norm != norm",
        ),
        Fault(
            "counts that add up to less than zero turn the gradients round",
            "result_of_norm",
            "0.0 <= norm < math.inf",
            "math.isfinite(norm)",
            "tests/unit/test_optim.py tests/training/test_loop_train_step.py "
            "tests/contract/test_brain_gradients.py",
        ),
        Fault(
            "the gradients of a skipped step stay for the next one",
            "take_step",
            "zero_gradients(optimizers, set_to_none=True)",
            "zero_gradients(optimizers if stepped else (), set_to_none=True)",
        ),
        Fault(
            "the loss scale never changes",
            "take_step",
            "scaler.update()",
            "pass",
            FP16,
        ),
        Fault(
            "a shared parameter is counted for each optimizer that has it",
            "parameters_of",
            "found if len(optimizers) == 1 else list(dict.fromkeys(found))",
            "found",
        ),
        Fault(
            "a fused step that is to be skipped is taken",
            "skip_flag",
            "(norm.sqrt() if can_be_negative else norm) * 0.0",
            "(norm.sqrt() if can_be_negative else norm).new_zeros(())",
            "tests/unit/test_optim.py tests/training/test_late_steps.py",
        ),
        Fault(
            "a fused step makes state in a step that is skipped",
            "_skip_by_themselves",
            "optimizer.state.get(parameter, {}).get(kept) is None",
            "False",
            "tests/unit/test_optim.py tests/training/test_late_steps.py",
        ),
        Fault(
            "a step counts as clipped below the limit",
            "result_of_norm",
            "0.0 < max_norm < norm",
            "0.0 < norm",
            "tests/unit/test_optim.py tests/training/test_late_steps.py",
        ),
        Fault(
            "a pending step is counted again by what follows it",
            "StepCounters.resolve_pending",
            "pending is None or pending.is_resolving",
            "pending is None",
            "tests/training/test_late_steps.py",
        ),
        Fault(
            "a recipe that reads a counter does not find the step just made",
            "StepCounters.resolved",
            "self.resolve_pending()",
            "pass",
            "tests/training/test_late_steps.py",
        ),
        Fault(
            "a checkpoint that a recipe saves does not count the step just made",
            "CheckpointPolicy._around_save",
            "self.context.progress.resolve_pending()",
            "pass",
            "tests/training/test_late_steps.py",
        ),
        Fault(
            "the error of a late step is raised where it is looked at by one rank",
            "StepCounters.resolve_pending",
            "self.pending_error = error",
            "raise",
            "tests/unit/test_optim.py tests/training/test_late_steps.py",
        ),
        Fault(
            "weight decay reaches biases and normalisation",
            "rm_vector_weight_decay",
            "parameter.ndim == 1",
            "parameter.ndim == 0",
        ),
        Fault(
            "gradients that are not finite are not dropped",
            "drop_nonfinite",
            "parameter.grad = None",
            "pass",
            "tests/unit/test_optim.py tests/contract/test_brain_gradients.py",
        ),
        Fault(
            "a schedule by steps moves on when another optimizer steps",
            "Schedule.after_step",
            "any((optimizer is self.optimizer for optimizer in stepped))",
            "True",
            SCHEDULES,
        ),
        Fault(
            "a schedule by epochs moves on after an epoch without a step",
            "Schedule.after_stage",
            "optimizer_step != self.stepped_at",
            "True",
            SCHEDULES,
        ),
        Fault(
            "a schedule that follows the loss is given that of the training",
            "Schedule.after_stage",
            "Stage.VALID if self.follows_loss else Stage.TRAIN",
            "Stage.TRAIN",
            SCHEDULES,
        ),
        Fault(
            "a resumed schedule takes the length of the new run",
            "Schedule.load_state_dict",
            "self._make(total)",
            "self._make(self.total_steps)",
            SCHEDULES,
        ),
        Fault(
            "a resumed schedule forgets at which step it has moved",
            "Schedule.state_dict",
            "self.stepped_at",
            "0",
            SCHEDULES,
        ),
        Fault(
            "the linear rule of --lr_scaling is the square root",
            "LrScaling.choose",
            "ratio if rule == 'linear' else math.sqrt(ratio)",
            "math.sqrt(ratio)",
            "tests/unit/test_optim_lr_scaling.py",
        ),
        Fault(
            "--lr_scaling divides instead of multiplying",
            "LrScaling.choose",
            "sizes.per_step / reference",
            "reference / sizes.per_step",
            "tests/unit/test_optim_lr_scaling.py",
        ),
        Fault(
            "a call of fit without a rule for rates has the factor of the one before",
            "RateFactor.forget",
            "self.value = 1.0",
            "pass",
            "tests/contract/test_lr_scaling.py",
        ),
        Fault(
            "an optimizer of two Brains keeps the factor of the one that has trained before",
            "RateFactor.take_over",
            "factors[optimizer] = self",
            "pass",
            "tests/contract/test_lr_scaling.py",
        ),
        Fault(
            "optimizers that a recipe puts in the place of others are not told to parts",
            "Run._prepare_new_optimizers",
            "self.hook_optimizers(brain, {})",
            "pass",
            "tests/contract/test_lr_scaling.py",
        ),
        Fault(
            "scaled learning rates stay in the groups after a step",
            "_restore",
            "group['lr'] = rate",
            "pass",
            "tests/unit/test_optim_lr_scaling.py",
        ),
        Fault(
            "rates are scaled twice after a step that failed",
            "_scale",
            "_own_rates.setdefault(optimizer, [group['lr'] for group in groups])",
            "[group['lr'] for group in groups]",
            "tests/unit/test_optim_lr_scaling.py",
        ),
        Fault(
            "a step whose norm is below the limit counts as clipped",
            "result_of_norm",
            "0.0 < max_norm < norm",
            "0.0 < max_norm",
            "tests/unit/test_optim.py tests/training/test_late_steps.py",
        ),
    ],
)

SCHEDULERS = in_room(
    "schedulers",
    "tests/unit/test_schedulers.py",
    [
        Fault(
            "NewBob anneals when the metric has become better by enough",
            "NewBobScheduler.__call__",
            "improvement < self.improvement_threshold",
            "improvement > self.improvement_threshold",
        ),
        Fault(
            "NewBob compares with the best metric and not with the last",
            "NewBobScheduler.__call__",
            "self.metric_values[-1]",
            "min(self.metric_values)",
        ),
        Fault(
            "the plateau scheduler waits one epoch less",
            "ReduceLROnPlateau.__call__",
            "self.patience_counter < self.patience",
            "self.patience_counter < self.patience - 1",
        ),
        Fault(
            "the plateau scheduler goes below its lowest rate",
            "ReduceLROnPlateau.__call__",
            "max(new, self.lr_min)",
            "new",
        ),
        Fault(
            "the linear scheduler reaches its end one epoch late",
            "LinearScheduler.__init__",
            "epoch / max(epoch_count - 1, 1)",
            "epoch / epoch_count",
        ),
        Fault(
            "Noam's decay begins at the wrong power of the warm-up",
            "NoamScheduler._rate",
            "math.pow(self.n_warmup_steps, 1.5)",
            "math.pow(self.n_warmup_steps, 1.0)",
        ),
    ],
)

EMA = in_room(
    "ema",
    "tests/unit/test_ema.py",
    [
        Fault(
            "a save inside of an evaluation with averaged weights has the averages",
            "KeptAverage.suspended",
            "contextlib.nullcontext() if self.weights is None else self.weights.suspended()",
            "contextlib.nullcontext()",
            "tests/unit/test_ema.py tests/contract/test_saves_in_hooks.py",
        ),
        Fault(
            "averaged weights begin with zeros instead of the weights",
            "WeightAverage.update",
            "_copy(weights, self._followed)",
            "pass",
        ),
        Fault(
            "the updates of averaged weights are not counted",
            "WeightAverage.update",
            "self.updates += 1",
            "self.updates = 1",
        ),
        Fault(
            "after an evaluation the model keeps the averaged weights",
            "WeightAverage.applied",
            "_copy(self._own, weights)",
            "pass",
        ),
        Fault(
            "averages are kept in the precision of the weights",
            "WeightAverage._average_of",
            "torch.promote_types(now.dtype, torch.float32)",
            "now.dtype",
        ),
        Fault(
            "averaged weights follow modules that the recipe has replaced",
            "WeightAverage.follow_modules_of",
            "self._owner = owner",
            "pass",
            "tests/unit/test_ema.py tests/contract/test_replaced_parts.py",
        ),
        Fault(
            "an average that is missing in a checkpoint is not told",
            "require_average",
            "RECOVERABLE not in checkpoint.paramfiles",
            "False",
        ),
        Fault(
            "a save within an evaluation holds averaged weights as the model's",
            "WeightAverage.suspended",
            "not self._is_applied",
            "True",
            "tests/unit/test_ema.py tests/contract/test_saves_in_hooks.py",
        ),
    ],
)

FAULTS = [*STEPS, *SCHEDULERS, *EMA]
