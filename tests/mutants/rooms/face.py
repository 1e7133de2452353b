"""Faults in the Brain, in what recipes call of several ranks, in porting and log lines."""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

BRAIN = "tests/contract/test_brain.py"

FAULTS = [
    *in_room(
        "brain",
        BRAIN,
        [
            Fault(
                "a Brain's fit_batch averages gradients in each micro-batch",
                "Brain.fit_batch",
                "self.no_sync(not should_step)",
                "self.no_sync(False)",
                "tests/test_hot_path.py tests/ranks/test_arithmetic.py",
            ),
            Fault(
                "a value is logged with the weight of a whole batch where the batch is repeated",
                "Brain.log",
                "window.weight if window.count else 0.0",
                "window.weight or 1.0",
                "tests/ranks/test_log.py",
            ),
            Fault(
                "a misspelt hook is not told",
                "warn_of_misspelt_hooks",
                "logger.warning_once(words, recipe.__name__, name, meant)",
                "pass",
                "tests/contract/test_misspelt.py",
            ),
            Fault(
                "--test_only trains",
                "Brain.fit",
                "self.run_opts.test_only",
                "False",
                BRAIN,
            ),
            Fault(
                "the schedule by steps is made for as many steps as there are epochs",
                "RecipeSchedule.make",
                "length.total_steps if every == 'step' else length.epochs",
                "length.epochs",
                "tests/contract/test_schedules.py",
            ),
        ],
    ),
    *in_room(
        "distributed",
        "tests/ranks/test_main_only.py",
        [
            Fault(
                "main-only code runs on every rank",
                "main_process_only",
                "dist.get_rank() != 0",
                "False",
            ),
            Fault(
                "sums over ranks of more than thirty numbers lose the rest",
                "sum_over_ranks",
                "values[MARKED_NUMBERS:]",
                "[]",
                "tests/ranks/test_main_only.py",
            ),
            Fault(
                "numbers of two different collectives are added up",
                "start_sum_over_ranks",
                "sums[:2] != [world_size * number for number in numbers[:2]]",
                "False",
                "tests/comm/test_late_ranks.py",
            ),
            Fault(
                "a collective within main-only code waits for the others",
                "require_all_ranks",
                "is_distributed_initialized() and ALONE.get()",
                "False",
                "tests/ranks/test_main_only.py tests/ranks/test_gathering.py",
            ),
        ],
    ),
    *in_room(
        "porting",
        "tests/porting/test_source_code_python.py tests/porting/test_source_code_yaml.py",
        [
            Fault(
                "a ported file loses what stands after the last change",
                "Source.result",
                "self.text[done:]",
                "''",
            ),
            Fault(
                "a name that is bound twice is renamed",
                "_Port.port_uses",
                "if is_ambiguous:\n"
                "    self.tell(ours[0][0], f'`{name}` is bound more than once: "
                "`{dotted(ours[0][0])}` is left')\n"
                "    return",
                "pass",
            ),
        ],
    ),
    *in_room(
        "logger",
        "tests/unit/test_logger.py",
        [
            Fault(
                "each rank says what the main process says",
                "MultiProcessLoggerAdapter.log",
                "not everywhere and _own_rank() > 0",
                "False",
                "tests/unit/test_logger.py tests/ranks/test_logger.py",
            ),
            Fault(
                "what is said once is said each time",
                "MultiProcessLoggerAdapter.warning_once",
                "self._said.add(text)",
                "pass",
            ),
            Fault(
                "what is read back from stderr is written there again",
                "TqdmCompatibleStreamHandler.filter",
                'not hasattr(record, "ddpkit_rank") or _is_shown_by_another(record)',
                "False",
            ),
        ],
    ),
]
