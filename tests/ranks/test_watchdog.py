"""Real ranks under the watchdog: it sees who stands still, ends with the group and leaves a normal
end alone.
"""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import threading
import time

import pytest
import torch.distributed as dist

from ddpkit.comm import get_runtime
from ddpkit.control import heartbeat, watchdog
from ddpkit.distributed import ddp_barrier
from ddpkit.epoch_loop import EpochCounter, EpochCounterWithStopper
from ddpkit.errors import NonFiniteLossError, RankFailedError
from ddpkit.types import Stage
from tests.launching import python, soon, start_by_hand, wait_until
from tests.recipes import Poisoned, Regression, make, points

WATCHING = {"ddpkit-heartbeat", "ddpkit-watch"}


def watching():
    return {thread.name for thread in threading.enumerate()} & WATCHING


# --------------------------------------------------------------------------------- who stands still


def stand_until_told():
    """Stand still until some rank has told what the test expects."""
    store = get_runtime().store
    end = time.monotonic() + 100
    while not store.check(["told"]) and time.monotonic() < end:
        time.sleep(0.05)


class Slow(Regression):
    """Is stuck on rank 1."""

    told = (
        r" s\. .*Where the ranks are:\nrank 1 \(.*\): in TRAIN of epoch 1 at step 2, for "
        r".*test_watchdog\.py.*\nrank 0: in TRAIN of epoch 1.* waiting for other ranks"
    )

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if dist.get_rank() == 1 and self.step == 2:
            stand_until_told()


class SlowBeforeABarrier(Regression):
    """Is stuck on rank 1, and rank 0 waits in a function of ddpkit."""

    told = (
        r"\nrank 0: in TRAIN of epoch 1 at step 2, for .* s waiting for other ranks at "
        r"test_watchdog\.py:\d+ in on_fit_batch_end, which is in \w+\.py:\d+ in await_late$"
    )

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.step == 2:
            if dist.get_rank() == 1:
                stand_until_told()
            ddp_barrier()


def is_told(kind, text):
    return "outside of fit" not in text and re.search(kind.told, text, re.MULTILINE)


def stand_still(kind=Slow):
    lines = []

    def emit(record):
        lines.append(record.getMessage())
        if hasattr(kind, "told") and is_told(kind, lines[-1]):
            get_runtime().store.set("told", "")

    handler = logging.Handler()
    handler.emit = emit
    logging.getLogger("ddpkit.control.watchdog").addHandler(handler)
    try:
        brain = make(kind, hang_warning=1.0, hang_timeout=1800.0)
        before = watching()
        brain.fit([1], points(16), train_loader_kwargs={"batch_size": 2})
    finally:
        logging.getLogger("ddpkit.control.watchdog").removeHandler(handler)
    watch = get_runtime().watchdog
    if watch is not None:
        watch.stop()
    dist.destroy_process_group()
    return before, lines, brain.optimizer_step


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize("kind", [Slow, SlowBeforeABarrier])
def test_a_rank_that_stands_still_is_named(ranks, kind):
    told = []
    for before, lines, steps in ranks.run(stand_still, kind, init=False):
        assert before == WATCHING
        assert steps == 4
        told += lines
    assert any(is_told(kind, text) for text in told), told


def test_a_group_that_others_started_is_not_watched(ranks):
    assert ranks.run(stand_still, Regression) == [(set(), [], 4)] * 2


class FailingAlone(Regression):
    """Fails in the second batch, on rank 1 alone."""

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if dist.get_rank() == 1 and self.step == 2:
            raise ValueError("boom")


def fail_alone():
    try:
        make(FailingAlone).fit([1], points(16), train_loader_kwargs={"batch_size": 2})
    except (ValueError, RuntimeError) as error:
        return str(error)


def test_who_fails_in_a_group_that_others_started_is_named_to_who_waits(ranks):
    waited, failed = ranks.run(fail_alone)
    assert failed == "boom"
    assert "failed first, in TRAIN of epoch 1 at step 2, at test_watchdog.py:" in waited
    assert waited.endswith(" in on_fit_batch_end: ValueError: boom")


class SlowLoader(Regression):
    """Is stuck on rank 0, before there is anything to train on."""

    told = (
        r"^rank 0 \(.*\): in fit, before the first stage: making the loader of TRAIN, for "
        r".*test_watchdog\.py"
    )

    def make_dataloader(self, *args, **kwargs):
        if dist.get_rank() == 0:
            stand_until_told()
        return super().make_dataloader(*args, **kwargs)


class SlowStart(Regression):
    """Is stuck on rank 1, when the others wrap their modules."""

    told = r"^rank 1 \(.*\): in fit, before the first stage: on_fit_start, for .*test_watchdog\.py"

    def on_fit_start(self):
        if dist.get_rank() == 1:
            stand_until_told()
        super().on_fit_start()


@pytest.mark.costly
@pytest.mark.parametrize("kind", [SlowLoader, pytest.param(SlowStart, marks=pytest.mark.slow)])
def test_a_rank_that_is_stuck_before_the_first_stage_is_not_said_to_be_outside_of_fit(ranks, kind):
    told = [text for _, lines, _ in ranks.run(stand_still, kind, init=False) for text in lines]
    assert any(is_told(kind, text) for text in told), told


# -------------------------------------------------------------------------- a group of ddpkit's own


@contextlib.contextmanager
def busy_watch():
    """Have the watchdog do in a blink what takes it seconds."""
    before = heartbeat.BEAT_SECONDS, watchdog.LOOK_SECONDS, watchdog.GRACE_SECONDS
    heartbeat.BEAT_SECONDS = 0.01
    watchdog.LOOK_SECONDS = 0.003
    watchdog.GRACE_SECONDS = 0.3
    try:
        yield
    finally:
        heartbeat.BEAT_SECONDS, watchdog.LOOK_SECONDS, watchdog.GRACE_SECONDS = before
        if dist.is_initialized():
            get_runtime().watchdog.stop()


def end(how):
    """Train until something that all ranks agree on ends it; return where this rank was then."""
    with busy_watch():
        epochs = EpochCounter(20)
        message = ""
        if how == "early":
            epochs = EpochCounterWithStopper(20, limit_to_stop=1, limit_warmup=0, direction="min")

        class Stopping(Poisoned):
            bad_steps = (2, 3, 5) if how == "patience" else ()
            bad_rank = 1

            def on_stage_end(self, stage, stage_loss, epoch=None):
                if how == "early" and stage is Stage.VALID:
                    epochs.update_metric(1.0 / epoch if dist.get_rank() or epoch < 4 else 9.0)

        options = {"patience": {"nonfinite_patience": 2}, "limit": {"optimizer_step_limit": 13}}
        brain = make(Stopping, **options.get(how, {}))
        try:
            brain.fit(epochs, points(24), points(4), train_loader_kwargs={"batch_size": 2})
        except NonFiniteLossError as error:
            message = str(error)
        watched = get_runtime().watchdog
        pulse = watched.heartbeat
        end_of_pulse = wait_until(
            lambda: pulse.beats > heartbeat.FIRST_BEATS and pulse.failure is None,
            10,
        )
        return (
            brain.progress.epoch,
            brain.step,
            brain.optimizer_step,
            message.partition(" had")[0],
            end_of_pulse,
        )


@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    ("how", "epoch", "step", "steps", "message"),
    [
        ("patience", 1, 5, 2, "3 steps of epoch 1"),
        ("early", 4, 0, 24, ""),
        ("limit", 3, 1, 13, ""),
    ],
)
def test_all_ranks_end_at_one_step_under_the_watch(ranks, how, epoch, step, steps, message):
    results = ranks.run(end, how, init=False)
    assert results[0] == results[1]
    found = results[0]
    assert found[0] == epoch
    assert found[2:] == (steps, message, True)
    assert how == "limit" or found[1] == step


# ------------------------------------------------------------------------ a failure that was caught


class Failing(Regression):
    """Fails on every rank, on rank 0 a little later."""

    def compute_forward(self, batch, stage):
        if dist.get_rank() == 0:
            time.sleep(0.05)
        raise ValueError("boom")


class Late(Regression):
    """Keeps rank 0 waiting in an epoch, for longer than the watchdog lets a rank wait for one that
    has failed.
    """

    epoch = 1

    def fit_batch(self, batch):
        if dist.get_rank() == 1 and self.step == 1 and self.progress.epoch == self.epoch:
            time.sleep(1.2)
        return super().fit_batch(batch)


def fail_and_catch(call, *arguments):
    with contextlib.suppress(ValueError, RankFailedError):
        call(*arguments)
        return False
    return True


def try_again_in_a_new_group():
    with busy_watch():
        brain = make(Failing)
        first = get_runtime()
        caught = fail_and_catch(brain.fit, [1], points(8))
        del brain
        dist.barrier()
        dist.destroy_process_group()
        brain = make(Late)
        threads = sorted(thread.name for thread in threading.enumerate() if thread.name in WATCHING)
        brain.fit([1], points(8), train_loader_kwargs={"batch_size": 2})
        report = get_runtime().report
        assert get_runtime() is not first
        left = first.report.has_departed(report.rank), report.has_departed(0)
        dist.barrier()  # who returns leaves, and the other may not have looked yet
        return caught, threads, brain.optimizer_step, *left


@pytest.mark.costly
def test_what_failed_in_one_group_does_not_end_the_next(ranks):
    found = ranks.run(try_again_in_a_new_group, init=False)
    assert found == [(True, sorted(WATCHING), 2, True, False)] * 2


def catch_in_a_nested_call():
    with busy_watch():
        judge = make(Failing)
        caught = []

        class Outer(Late):
            epoch = 2

            def on_stage_end(self, stage, stage_loss, epoch=None):
                if stage is Stage.VALID and epoch == 1:
                    caught.append(fail_and_catch(judge.evaluate, points(4)))

        brain = make(Outer)
        brain.fit(range(1, 4), points(8), points(4), train_loader_kwargs={"batch_size": 2})
        return caught, brain.optimizer_step


@pytest.mark.slow
def test_a_failure_that_was_caught_in_a_nested_call_does_not_end_the_outer_one(ranks):
    assert ranks.run(catch_in_a_nested_call, init=False) == [([True], 6)] * 2


# --------------------------------------------------------------------------- waiting outside of fit

WAITING = """\
import atexit, os, signal, time
from ddpkit.comm import mailbox, process_group
from ddpkit.control import heartbeat, watchdog
from ddpkit.distributed import ddp_init_group, exchange, get_rank

mailbox.TROUBLE_SECONDS = 0.2
if os.environ["LOCAL_WORLD_SIZE"] == "1":
    os.environ.update(LOCAL_RANK="0", GROUP_RANK=os.environ["RANK"])
BEFORE
ddp_init_group({"device": "cpu", "hang_timeout": LIMIT})
assert exchange("met")[1] == "met"
if get_rank() == WHO:
    WHAT
print(exchange("here"))
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"


def wait_outside(folder, rank, what, near="2", limit=3.0, before=""):
    words = {"WHO": str(rank), "WHAT": what, "LIMIT": str(limit), "BEFORE": before}
    text = WAITING
    for word, value in words.items():
        text = text.replace(word, value)
    (folder / "train.py").write_text(text)
    return start_by_hand(
        python(str(folder / "train.py")),
        folder,
        2,
        warm=True,
        LOCAL_WORLD_SIZE=near,
    )


@pytest.mark.corner
@pytest.mark.parametrize(
    ("near", "what", "limit", "says"),
    [
        ("2", KILL, 1800.0, "disappeared: it was killed, or has crashed"),
        (
            "1",
            KILL,
            1800.0,
            (
                r"disappeared: it (sent no heartbeat|closed its connections) .*: it was killed.*is "
                r"down"
            ),
        ),
        pytest.param(
            "1",
            STOP,
            8.0,
            r"sent no heartbeat for \d+ s \(--hang_timeout=8\): it was killed or stopped",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["killed, one machine", "killed, two machines", "stopped, two machines"],
)
def test_who_waits_for_a_lost_rank_outside_of_fit_ends_and_names_it(
    tmp_path,
    near,
    what,
    limit,
    says,
):
    main, other = wait_outside(tmp_path, 1, what, near, limit)
    if what == KILL:
        other.wait(30)
    began = time.monotonic()
    main.wait(30)
    assert what == STOP or soon(began, 6)
    other.signal(signal.SIGKILL)
    other.wait(5)
    assert (main.code, other.code) == (1, -9), other.err
    assert f"rank 1 ({watchdog.host_name()}, pid " in main.tail(2), main.err
    assert re.search(says, main.tail(2))
    assert "(rank 0 was waiting at train.py:14 in <module> for rank 1)" in main.tail(1)


@pytest.mark.parametrize("call", ["_start_watchdog", pytest.param("_join", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_while_the_group_is_made_is_named(tmp_path, call):
    """On another machine, once all have met: before it has told anything, and before there is a
    connection to it.
    """
    dies = (
        f"heartbeat.START_SECONDS = 2.0\nif os.environ['RANK'] == '1': process_group.{call} = "
        f"lambda *_: {KILL}"
    )
    main, other = wait_outside(tmp_path, 1, "pass", "1", 1800.0, dies)
    other.wait(30)
    began = time.monotonic()
    main.wait(30)
    assert soon(began, 6)
    assert (main.code, other.code) == (1, -9), other.err
    assert re.search(
        r"rank 1\b.* disappeared: it sent no heartbeat for \d+ s: it was killed",
        main.tail(1),
    ), main.err


@pytest.mark.corner
@pytest.mark.parametrize("rank", [0, 1])
def test_a_child_that_a_rank_forks_does_not_say_goodbye_for_it(tmp_path, rank):
    forked = (
        "child = os.fork() or (atexit._run_exitfuncs(), os._exit(0)); os.waitpid(child, 0); "
        "time.sleep(0.5)"
    )
    for run in wait_outside(tmp_path, rank, forked):
        run.wait(30)
        assert run.code == 0, run.err
        assert "['here', 'here']" in run.out
