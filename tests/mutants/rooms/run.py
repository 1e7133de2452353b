"""Faults in one run of a Brain: stages, positions, saves, stops, what is checked before and said
after.
"""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

STAGES = "tests/run/test_stage_runner.py"
STATE = (
    "tests/run/test_run_state.py tests/run/test_choose_start.py tests/run/test_run_state_resume.py"
)
RESUME = "tests/contract/test_brain_resume.py tests/contract/test_exact_resume.py"
SAVES = "tests/run/test_checkpoint_policy.py tests/run/test_save_and_stop_registering.py"
WITH_NEW = "tests/contract/test_resume_with_new.py"
INIT_FROM = "tests/contract/test_init_from.py"
STOP = "tests/run/test_stop_control.py"
MICRO = (
    "tests/ranks/test_auto_micro_batch.py::test_the_noise_of_an_attempt_that_failed_is_drawn_again "
    "tests/ranks/test_auto_micro_batch.py::test_on_one_process_batch_statistics_move_once"
)

FAULTS = in_room(
    "run",
    STAGES,
    [
        Fault(
            "a resumed epoch goes on with the batch after the next one",
            "RunState._go_on_inside_epoch",
            "batches * self.context.strategy.division().each",
            "(batches + 1) * self.context.strategy.division().each",
            f"{STATE} {RESUME}",
        ),
        Fault(
            "with other samples per step an epoch goes on a step too far",
            "StepPlan.batches_done",
            "samples // self.per_step",
            "-(-samples // self.per_step)",
            STATE,
        ),
        Fault(
            "a window that a checkpoint has cut is not done again",
            "StepPlan.batches_done",
            "-(-step // (before.grad_accumulation_factor or 1)) * factor",
            "step // (before.grad_accumulation_factor or 1) * factor",
            STATE,
        ),
        Fault(
            "on other processes a step has other samples",
            "StepPlan.on",
            "{'global_batch_size': self.per_step, 'micro_batch_size': self.per_process, "
            "'grad_accumulation_factor': 1}",
            "{}",
            f"{STATE} tests/contract/test_resume_changes.py",
        ),
        Fault(
            "changed options of a resumed run are not told",
            "RunState._warn_of_changes",
            "logger.warning(words, '; '.join(changes))",
            "pass",
            f"{STATE} tests/contract/test_resume_changes.py",
        ),
        Fault(
            "an optimizer of another class takes a checkpoint's state",
            "changed_settings",
            "old.get('class') not in {None, new['class']} and kinds[0] != kinds[1]",
            "False",
            "tests/contract/test_resume_optimizers.py",
        ),
        Fault(
            "frozen parameters are trained after a resume",
            "RunState.restore_trained_flags",
            "parameter.requires_grad_(wanted)",
            "pass",
            "tests/contract/test_frozen_parameters.py",
        ),
        Fault(
            "a debug run's checkpoint is gone on from",
            "_without_rehearsals",
            "states[checkpoint.path].get(DEBUG) is True",
            "False",
            f"{STATE} tests/contract/test_started_again.py",
        ),
        Fault(
            "a process that only evaluated has made the newest training state",
            "choose_start",
            "states[checkpoint.path].get(EVALUATED) is not True",
            "True",
            f"{STATE} tests/contract/test_other_saves.py",
        ),
        Fault(
            "a save inside of a batch counts that batch's loss twice",
            "RankState._losses_so_far",
            "not self.is_inside_batch or progress.result is None "
            "or progress.result_of != progress.step",
            "progress.result is None or progress.result_of != progress.step",
            "tests/run/test_rank_state.py tests/contract/test_saves_in_hooks.py",
        ),
        Fault(
            "weights of the modules that nobody saves are not told",
            "CheckpointPolicy.recover",
            "logger.warning(words, ', '.join(lost))",
            "pass",
            f"{SAVES} tests/contract/test_other_saves.py",
        ),
        Fault(
            "--time_limit stops nothing",
            "StopControl.cause",
            "TIME_LIMIT if over else ''",
            "''",
            "tests/contract/test_assigned_options.py -k time_limit",
        ),
        Fault(
            "the state of Adam is counted once for the room of a checkpoint",
            "_moments",
            "2 + bool(group.get('amsgrad'))",
            "1 + bool(group.get('amsgrad'))",
            "tests/run/test_output_checks.py tests/contract/test_output_folder.py",
        ),
        Fault(
            "options that are assigned are not checked",
            "Run.check_options",
            "options.check()",
            "pass",
            "tests/contract/test_assigned_options.py tests/contract/test_bad_input.py",
        ),
        Fault(
            "a resumed epoch forgets the losses before the checkpoint",
            "RunState._go_on_inside_epoch",
            "progress.meter.restore(loss_sum, count, samples=samples)",
            "pass",
            f"{STATE} {RESUME}",
        ),
        Fault(
            "the optimizer step of a resumed run is that of the epoch",
            "RunState.load",
            "state.get('optimizer_step', state['step'])",
            "state['step']",
            f"{STATE} {RESUME}",
        ),
        Fault(
            "the random streams of a resumed epoch begin anew",
            "RankState.begin_pass",
            "self._seed_anew if random is None else functools.partial(restore_rng_state, random)",
            "self._seed_anew",
            f"tests/run/test_rank_state.py {RESUME}",
        ),
        Fault(
            "the main process restores its own random state for all ranks",
            "RankStates.load_state_dict",
            "ranks[rank] if self.is_of_as_many else _common(ranks) | _counted(ranks)",
            "ranks[0] if self.is_of_as_many else _common(ranks) | _counted(ranks)",
            "tests/run/test_rank_state.py tests/ranks/test_exact_resume.py",
        ),
        Fault(
            "the gradients of an epoch's short own window are lost",
            "StageRunner._after_last_batch",
            """
            if train_step.prepare_flush(brain):
                brain.optimizers_step()
            """,
            "pass",
            "tests/run/test_stage_runner.py tests/contract/test_steps_of_a_window.py "
            "tests/contract/test_gradients_of_a_window.py",
        ),
        Fault(
            "validation trains the modules' batch statistics",
            "StageRunner.evaluate",
            "stage_mode(lambda: self.context.modules, training=False)",
            "stage_mode(lambda: self.context.modules, training=True)",
            "tests/run/test_stage_runner.py tests/contract/test_module_modes.py",
        ),
        Fault(
            "a test within fit leaves the modules in evaluation mode",
            "kept_modes",
            "module.training = training",
            "pass",
            "tests/contract/test_module_modes.py tests/run/test_stage_runner.py",
        ),
        Fault(
            "--ckpt_interval_steps saves a step late",
            "CheckpointPolicy.save_if_due",
            "0 < steps <= batches_since_ckpt",
            "0 < steps < batches_since_ckpt",
            f"{SAVES} {STAGES}",
        ),
        Fault(
            "--ckpt_interval_minutes counts seconds",
            "CheckpointPolicy.save_if_due",
            "0 < minutes * 60 <= seconds_since_ckpt",
            "0 < minutes <= seconds_since_ckpt",
            f"{SAVES} {STAGES}",
        ),
        Fault(
            "a window is saved in its middle",
            "IntraEpochSaves.would_be_incomplete",
            "progress.window.num_deferred(progress.step) > 0 "
            "or self.context.strategy.weights_differ",
            "self.context.strategy.weights_differ",
            f"{STAGES} {RESUME}",
        ),
        Fault(
            "a stop that was asked for saves nothing",
            "StopControl.stop_training",
            "not is_saved",
            "is_saved",
            "tests/contract/test_assigned_options.py -k time_limit",
        ),
        Fault(
            "the note of an earlier stop stays",
            "StopControl.remove_note",
            "run_on_main(remove_marker, args=(folder,))",
            "pass",
            "tests/contract/test_assigned_options.py -k time_limit",
        ),
        Fault(
            "ranks with other options are not told",
            "Preflight.compare_ranks",
            "option_facts(options)",
            "{}",
            "tests/run/test_preflight.py tests/ranks/test_preflight.py",
        ),
        Fault(
            "ranks with other data are compared by nothing but their number",
            "Preflight.compare_data",
            "compare_samples(name, loader)",
            "pass",
            "tests/ranks/test_likeness.py",
        ),
        Fault(
            "the last epoch of a range is one too many",
            "last_epoch",
            "expected[-1]",
            "expected[-1] + 1",
            "tests/run/test_epoch_numbers.py",
        ),
        Fault(
            "the shown learning rate is without the factor of --lr_scaling",
            "rate_of_bar",
            "float(group['lr']) * rate_factor(optimizer)",
            "float(group['lr'])",
            "tests/run/test_learning_rates.py tests/contract/test_lr_scaling.py "
            "tests/contract/test_bar.py",
        ),
        Fault(
            "an optimizer that has begun anew does so at every start",
            "NewSettings._is_new",
            "what in self.asked and what not in (self._state.get('resume_with_new') or ())",
            "what in self.asked",
            WITH_NEW,
        ),
        Fault(
            "a new rate of the script is set again over what the recipe has made of it",
            "NewSettings.merged",
            "not knows or old.get(key) != new[key]",
            "True",
            WITH_NEW,
        ),
        Fault(
            "a schedule of the script begins at its first step in a run that goes on",
            "Schedule.go_on_as_made",
            "range(made)",
            "range(0)",
            WITH_NEW,
        ),
        Fault(
            "a run that goes on begins with the weights of init_from again",
            "InitialWeights.begin",
            "start is not None and isinstance(start.resume, Checkpoint)",
            "False",
            INIT_FROM,
        ),
        Fault(
            "weights of init_from that do not fit are left out unasked",
            "InitialWeights._judge",
            "self._misfits.without(self._may_be_left_out)",
            "Misfits()",
            INIT_FROM,
        ),
        Fault(
            "ranks may read other files under the path of init_from",
            "_require_same_files",
            "get_world_size() > 1",
            "False",
            "tests/run/test_initial_weights.py",
        ),
        Fault(
            "a weight that shares its tensor with one that is loaded counts as missing",
            "load_without_base",
            "id(own.get(name)) not in loaded",
            "True",
            INIT_FROM,
        ),
        Fault(
            "operations of a step are counted in all of its repetitions",
            "StepFlops._finish",
            "self.is_done = True",
            "pass",
            "tests/run/test_step_flops.py",
        ),
        Fault(
            "steps without a loss are counted from a resume on",
            "RunState._go_on_inside_epoch",
            "state.get('empty_steps', 0)",
            "0",
            "tests/ranks/test_skipped_batches.py",
        ),
    ],
)
