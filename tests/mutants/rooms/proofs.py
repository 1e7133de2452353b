"""Faults in what proves that bits are the same: audits, records of hashes, replays, and the drawn
recipes with virtual ranks; and in the choice between two ways with the same bits.
"""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

AUDIT = "tests/parts/test_rank_audit.py"
AUDIT_OF_RANKS = "tests/ranks/test_rank_audit.py"
REPLAY = "tests/see/diff/test_replay.py"
DRAWN = "tests/model/same_bits/test_same_bits.py -m slow -k one_process"
EARLY_SUMS = "tests/strategies/test_early_sums.py"
READING = "tests/training/test_norm_reading.py"
READING_OF_RANKS = f"{READING} -k ranks_choose"

AUDITS = in_room(
    "parts",
    AUDIT,
    [
        Fault(
            "an audit finds no difference",
            "RankAudit.before_sums",
            "found != theirs.answer",
            "False",
            AUDIT_OF_RANKS,
        ),
        Fault(
            "an audit computes with the noise of its own shard",
            "ShardAgain.compute",
            "strategy.begin_again(work.number, work.rank)",
            "strategy.begin_again(work.number, 0)",
            f"{AUDIT_OF_RANKS} -k nothing_is_found",
        ),
        Fault(
            "an audit names the ranks that agree",
            "judged",
            "given[0] != right",
            "given[0] == right",
            f"{AUDIT} -k who_is_wrong",
        ),
        Fault(
            "an audit counts in the metrics of the training",
            "ShardAgain._leaving_nothing",
            "metrics.put_back()",
            "pass",
        ),
        Fault(
            "each audit is of the first batch of a window",
            "RankAudit.before_batch",
            "(step // self.every - 1) % factor",
            "0",
        ),
        Fault(
            "the copy of a batch for an audit is aligned otherwise",
            "_description",
            "tensor.data_ptr() % ALIGNED_BYTES // tensor.element_size()",
            "0",
        ),
    ],
)

REPLAYS = in_room(
    "see",
    REPLAY,
    [
        Fault(
            "a replay goes on from a checkpoint that has the difference in it",
            "_source",
            "run.checkpoints_up_to(equal_before)",
            "run.checkpoints_up_to(10**9)",
        ),
        Fault(
            "a replay goes on from a damaged checkpoint",
            "_source",
            "not verify(folder)",
            "True",
        ),
        Fault(
            "a replay has records of the steps that the run had recorded",
            "_plan",
            '{**options, "hash_every": 1, "measure_steps": "off"}',
            '{**options, "measure_steps": "off"}',
        ),
        Fault(
            "a replay is not held against what the run had recorded",
            "_held_against",
            "differing(run.steps[step], found.steps[step])",
            "[]",
        ),
    ],
)

DRAWN_RECIPES = in_room(
    "strategies",
    DRAWN,
    [
        Fault(
            "the noise of a virtual rank is that of its process's turn",
            "VirtualRanks._shards_of",
            "seed_streams(*self._place, self._division.mine[self._shard])",
            "seed_streams(*self._place, self._shard)",
        ),
    ],
)

EARLY = in_room(
    "strategies",
    EARLY_SUMS,
    [
        Fault(
            "the sum of a gradient that comes in parts begins with the first part",
            "EarlySums._beginning",
            "number_of_parts == 1",
            "number_of_parts >= 1",
        ),
        Fault(
            "sums begin early where hooks of the recipe change gradients",
            "EarlySums.backward_pass",
            "not self._parameters or is_hooked_backward(modules)",
            "not self._parameters",
        ),
        Fault(
            "a sum is written into a gradient that has its memory together with another",
            "EarlySums._beginning",
            "gradient if is_read_only else self._copy(place, gradient)",
            "gradient",
        ),
    ],
)

EARLY_ROWS = in_room(
    "comm",
    EARLY_SUMS,
    [
        Fault(
            "each rank expects the gradients that it had itself in the step before",
            "OrderedSum.over_ranks",
            "tuple(place for place in self.large_places if present[place])",
            "tuple(p for p in self.large_places if any(one[p] is not None for one in own))",
        ),
    ],
)

CHOICE = in_room(
    "training",
    READING,
    [
        Fault(
            "each rank chooses by itself when the norm is read",
            "NormReading._choose",
            'sum_over_ranks([*own, float(not self.has_read_later)], "norm")',
            "[*own, float(not self.has_read_later)]",
            READING_OF_RANKS,
        ),
        Fault(
            "steps that wait for those of the other way count",
            "NormReading._try_step",
            "number > 0 and (number - 1) % STEPS_OF_A_TURN >= CHANGING_STEPS",
            "number > 0",
        ),
        Fault(
            "long steps count in the choice when the norm is read",
            "_typical",
            "int(COUNTED_SHARE * len(seconds))",
            "len(seconds)",
        ),
        Fault(
            "the slower way to read the norm is kept",
            "NormReading._choose",
            "later <= first or missing > 0",
            "later > first or missing > 0",
        ),
    ],
)

FAULTS = [*AUDITS, *REPLAYS, *DRAWN_RECIPES, *EARLY, *EARLY_ROWS, *CHOICE]
