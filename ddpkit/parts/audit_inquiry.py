"""Finds out which rank is wrong when two have different bits of the same shard, and ends the run.

All ranks compute the shard once more. More than half of them have a majority; of two, one may not
give its own bits again. What cannot be told is said to be unknown.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ddpkit.base import host_name, load_plain_yaml
from ddpkit.control import show_without_traceback
from ddpkit.distributed import gather_objects, run_on_main
from ddpkit.errors import AuditError
from ddpkit.logger import address_of
from ddpkit.parts.audit_verdict import Judgement, judged
from ddpkit.parts.state_digests import combined
from ddpkit.train_logger import run_event

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpkit.parts.shard_again import ShardAgain, ShardWork
    from ddpkit.training import RunContext

FAILED = 1  # exit code
MOST_DISPUTES = 2  # that are looked into: a rank that is always wrong makes two
PAIR = 2

NAMED = (
    "audit_every: {who} computed other bits than {others}: of {shard} in optimizer step {step}, "
    "the first that differs is {tensor}.{more} The step was not taken. {saved} Take that machine "
    "out, test its memory and processors, and start the same command again on others."
)
UNDECIDED = (
    "audit_every: {who} compute different bits of {shard} in optimizer step {step}: the first that "
    "differs is {tensor}. Computed again, each gave its own bits once more, so that nothing tells "
    "which one is wrong.{more} The step was not taken. {saved} Start three processes or more, "
    "which have a majority, or test the machines."
)
NOT_REPEATABLE = (
    "audit_every: {shard} in optimizer step {step} comes to other bits when {who} computes it "
    "again: the first that differs is {tensor}. So no process can be named as wrong: an operation "
    "of the recipe is not repeatable, or compute_forward depends on what it has counted before. "
    "The step was not taken. {saved}"
)
ALONE = (
    "audit_every: {who} has computed {shard} of optimizer step {step} three times, with different "
    "bits: the first that differs is {tensor}. {more} With one process nothing tells a fault of "
    "the machine from an operation that is not repeatable, or from a compute_forward that depends "
    "on what it has counted before. The step was not taken. {saved}"
)
RIGHT_AGAIN = " Computed again there, it was right."
SAME_AGAIN = " Computed again there, it was wrong in the same way."
OTHER_AGAIN = " Computed again there, it was wrong in another way."
NOT_ITSELF = " Computed again, it did not give its own bits once more, and the other process did."
WEIGHTS = " Its weights are not those of the others; the first that differs is {}."
TWO_WEIGHTS = " Their weights differ, too, first {}."
FIRST_ALONE = "The first answer is not the two later ones, which are equal."
SECOND_ALONE = "The first answer and the last are equal."
ALL_DIFFER = "All three differ."
NO_CHECKPOINT = "There is no checkpoint."
SAVED = "Up to optimizer step {} audits have found nothing, and {}."
NEWEST = "the newest checkpoint of up to there is {}"
NONE_SO_OLD = "all checkpoints are of later steps"


@dataclass
class Report:
    """What a rank says of itself and of the rank after it.

    Attributes:
        where: its rank, host and device.
        own: its first answer for its own shard, by tensor.
        audit: what it has come to for the shard of the rank after it.
        inputs: digests of its weights, and of the buffers at the beginning of the step.

    Ranks: local.
    """

    where: str
    own: Mapping[str, str]
    audit: Mapping[str, str]
    inputs: Mapping[str, str]


@dataclass
class Dispute:
    """A shard of which two ranks have different bits.

    Attributes:
        rank: whose shard it is.
        shard: its number over all ranks.
        answers: of each rank, in the order in which it gave them, by tensor.

    Ranks: local; alike on every rank.
    """

    rank: int
    shard: int
    answers: dict[int, list[Mapping[str, str]]]

    def judged(self) -> Judgement:
        """Say whose answer is wrong."""
        digests = {}
        for rank, given in self.answers.items():
            digests[rank] = [combined(answer) for answer in given]
        return judged(digests)

    def first_difference(self) -> str:
        """Return the name of the first tensor that the answers differ in."""
        every = [answer for given in self.answers.values() for answer in given]
        return first_difference(every)


class AuditInquiry:
    """Finds out which rank is wrong, and ends the run.

    Args:
        context: of the run.
        brain: of the recipe.
        again: computes a shard again.

    Ranks: collective; all ranks come to the same end.
    """

    def __init__(self, context: RunContext, brain: Any, again: ShardAgain) -> None:
        self._context = context
        self._brain = brain
        self._again = again

    def end(self, work: ShardWork, audit: Mapping[str, str], clean: int) -> NoReturn:
        """Have all ranks compute what two of them differ in, and say which one is wrong.

        Args:
            work: of this rank.
            audit: what it has come to for the rank after it.
            clean: the last optimizer step up to which audits have found nothing.

        Raises:
            AuditError: always.
        """
        told = gather_objects(lambda: self._report(work, audit))
        disputes = self._disputes(work, told)
        verdicts = [dispute.judged() for dispute in disputes]
        wrong = _wrong_of(verdicts)
        # its own shard, if it is wrong there, says more than one that it has audited
        shown = next((one for one in disputes if one.rank in wrong), disputes[0])
        message = self._words(told, shown, verdicts, self._saved(clean))
        run_event(
            "audit",
            epoch=self._context.progress.epoch,
            optimizer_step=self._step,
            shard=shown.shard,
            first=shown.first_difference(),
            wrong=[told[rank].where for rank in wrong],
        )
        error = AuditError(message)
        show_without_traceback(error, FAILED)  # no line of code is wrong
        raise error

    @property
    def _step(self) -> int:
        """The optimizer step that is not taken."""
        step: int = self._brain.optimizer_step
        return step + 1

    def _report(self, work: ShardWork, audit: Mapping[str, str]) -> Report:
        where = f"rank {work.rank} (host {host_name()}, {self._context.device})"
        return Report(where, work.answer, audit, self._again.inputs())

    def _disputes(self, work: ShardWork, told: Sequence[Report]) -> list[Dispute]:
        """Have all ranks compute the shards of which two have different bits."""
        ranks = range(len(told))
        disputes: list[Dispute] = []
        for rank in ranks:
            auditor = (rank - 1) % len(told)
            if told[rank].own == told[auditor].audit or len(disputes) == MOST_DISPUTES:
                continue
            # sent to all now, and not before: few audits come to this
            theirs = self._work_of(rank, work)
            later = gather_objects(functools.partial(self._again.compute, theirs))
            answers: dict[int, list[Mapping[str, str]]] = {other: [] for other in ranks}
            answers[rank].append(told[rank].own)
            answers[auditor].append(told[auditor].audit)
            for other in ranks:  # of the two that differ it is the second answer
                answers[other].append(later[other])
            disputes.append(Dispute(rank, theirs.shard, answers))
        return disputes

    def _work_of(self, rank: int, own: ShardWork) -> ShardWork:
        works = gather_objects(lambda: own if own.rank == rank else None)
        return next(found for found in works if found is not None)

    # ------------------------------------------------------------------ in words

    def _words(
        self,
        told: Sequence[Report],
        dispute: Dispute,
        verdicts: Sequence[Judgement],
        saved: str,
    ) -> str:
        """Return what is said of a dispute."""
        facts = {
            "shard": f"virtual rank {dispute.shard}",
            "step": self._step,
            "tensor": dispute.first_difference(),
            "saved": saved,
        }
        if len(told) == 1:
            more = _order_of_three(dispute.answers[0])
            return ALONE.format(who=told[0].where, more=more, **facts)
        wrong = _wrong_of(verdicts)
        if wrong:
            others = "the other process" if len(told) == PAIR else "the others"
            more = "".join(_more(rank, told, dispute) for rank in wrong)
            return NAMED.format(who=_listed(told, wrong), others=others, more=more, **facts)
        unsteady = sorted(set().union(*(verdict.unsteady for verdict in verdicts)))
        if unsteady:
            return NOT_REPEATABLE.format(who=_listed(told, unsteady), **facts)
        who = _listed(told, range(len(told)))
        return UNDECIDED.format(who=who, more=_two_weights(told), **facts)

    def _saved(self, clean: int) -> str:
        """Say which checkpoint is of before all that may be wrong."""
        checkpointer = self._brain.checkpointer
        if checkpointer is None:
            return NO_CHECKPOINT
        return run_on_main(_checkpoint_up_to, args=(checkpointer, clean)) or NO_CHECKPOINT


def _checkpoint_up_to(checkpointer: Any, step: int) -> str:
    checkpointer.wait()
    if checkpointer.find_checkpoint() is None:
        return NO_CHECKPOINT
    found = checkpointer.find_checkpoint(ckpt_predicate=lambda one: _step_of(one) <= step)
    words = NONE_SO_OLD if found is None else NEWEST.format(address_of(found.path))
    return SAVED.format(step, words)


def _step_of(checkpoint: Any) -> float:
    """Return the optimizer step of a checkpoint."""
    state = load_plain_yaml(checkpoint.paramfiles["brain"].read_text(encoding="utf-8"))
    step: int = state["optimizer_step"]
    return step


def first_difference(answers: Sequence[Mapping[str, str]]) -> str:
    """Return the first name under which the answers are not all equal.

    Ranks: local.

    Example:
        >>> first_difference([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}])
        'b'
    """
    for name in answers[0]:
        if len({answer.get(name) for answer in answers}) > 1:
            return name
    return ""


def _wrong_of(verdicts: Sequence[Judgement]) -> list[int]:
    """Return the ranks that are wrong; none where others do not repeat their answers, either."""
    if not all(verdict.is_repeatable for verdict in verdicts):
        return []
    return sorted(set().union(*(verdict.wrong for verdict in verdicts)))


def _listed(told: Sequence[Report], ranks: Iterable[int]) -> str:
    return " and ".join(told[rank].where for rank in ranks)


def _order_of_three(answers: Sequence[Mapping[str, str]]) -> str:
    first, second, last = answers
    if second == last:
        return FIRST_ALONE
    return SECOND_ALONE if first == last else ALL_DIFFER


def _more(rank: int, told: Sequence[Report], dispute: Dispute) -> str:
    """Say what is known besides of a rank that is wrong."""
    first, *later = dispute.answers[rank]
    if len(told) == PAIR:
        words = NOT_ITSELF
    elif not later:
        words = ""
    elif later[0] == first:
        words = SAME_AGAIN
    else:
        right = [given[0] for other, given in dispute.answers.items() if other != rank]
        words = RIGHT_AGAIN if later[0] in right else OTHER_AGAIN
    others = [one.inputs for number, one in enumerate(told) if number != rank]
    agree = all(inputs == others[0] for inputs in others)
    if agree and told[rank].inputs != others[0]:
        words += WEIGHTS.format(first_difference([told[rank].inputs, others[0]]))
    return words


def _two_weights(told: Sequence[Report]) -> str:
    name = first_difference([one.inputs for one in told])
    return TWO_WEIGHTS.format(name) if name else ""
