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
            "batches * self.context.strategy.shards",
            "(batches + 1) * self.context.strategy.shards",
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
            "[checkpoint for checkpoint in found if checkpoint not in rehearsals]",
            "found",
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
            STOP,
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
    ],
)
