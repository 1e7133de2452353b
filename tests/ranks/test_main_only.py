"""Main-only work on real ranks: who may call, errors, values, collectives."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import re
import threading
import time

import pytest
import torch
import torch.distributed as dist

from ddpkit import distributed as ddp
from ddpkit.comm import shorten_timeout
from ddpkit.distributed import node_work
from ddpkit.errors import LaunchError, MainProcessError, RankFailedError
from tests.launching import PATIENCE, Run, python, start_by_hand, torchrun
from tests.rank_pool import RankPoolError

WORLD = 3


def counted() -> int:
    """Return a number that tells how often this process has come here, and which process it is."""
    counted.calls = getattr(counted, "calls", 0) + 1
    return 100 * dist.get_rank() + counted.calls


def fresh() -> None:
    counted.calls = 0


def in_step() -> None:
    """Fail if the ranks have come apart: every rank must see rank 0's value of this very call."""
    token = ddp.run_on_main(time.monotonic_ns)
    assert ddp.exchange(token) == [token] * dist.get_world_size()
    assert ddp.ddp_broadcast(dist.get_rank()) == 0
    ddp.ddp_barrier()


# ------------------------------------------------------------------------------------- who may call


def both_ways():
    fresh()
    values = [ddp.run_on_main(counted)]
    if ddp.if_main_process():
        values.append(ddp.run_on_main(counted))  # nobody waits for it, and it waits for nobody
    values.append(ddp.run_on_main(counted))
    in_step()
    return values


def test_a_call_of_main_alone_is_legal(ranks):
    assert ranks.run(both_ways, world_size=WORLD) == [[1, 2, 3], [1, 3], [1, 3]]


def helper():
    return ddp.run_on_main(counted)


def same_helper():
    fresh()
    values = []
    for _ in range(3):
        if ddp.if_main_process():
            helper()
        values.append(helper())
    in_step()
    return values


def test_the_same_helper_from_all_ranks_and_from_main_alone(ranks):
    """The path of lines that leads to a call is its name, so the counts of the two uses are
    apart.
    """
    assert ranks.run(same_helper, world_size=WORLD) == [[2, 4, 6]] * WORLD


def recursive(depth):
    if depth == 0:
        return ddp.run_on_main(counted)
    return [ddp.run_on_main(counted), recursive(depth - 1)]


def outer():
    inside = [ddp.run_on_main(counted), ddp.ddp_prevent_block(), inner()]
    return [*inside, ddp.exchange("alone")]


@ddp.main_process_only
def inner():
    return ddp.run_on_main(counted)


def nested_and_recursive():
    fresh()
    results = [
        ddp.run_on_main(outer),
        recursive(3),
        [ddp.run_on_main(counted) for _ in range(3)],
        inner(),
    ]
    in_step()
    return results


def test_nested_recursive_and_in_loops(ranks):
    expected = [[1, True, 2, ["alone"]], [3, [4, [5, 6]]], [7, 8, 9], 10]
    assert ranks.run(nested_and_recursive, world_size=WORLD) == [expected] * WORLD


class Logger:
    def __init__(self):
        self.lines = []

    @ddp.main_process_only(hand_over=False)
    def log(self, line):
        self.lines.append(line)
        return line

    @ddp.main_process_only
    def describe(self, *, length):
        """Describe."""
        return f"{len(self.lines)} of {length}"


def logged():
    logger = Logger()
    first = logger.log("a")
    if ddp.if_main_process():
        logger.log("b")
        logger.describe(length=0)
    described = logger.describe(length=3)
    in_step()
    return first, logger.lines, described, Logger.describe.__doc__


def test_main_process_only(ranks):
    assert ranks.run(logged, world_size=WORLD) == [
        ("a", ["a", "b"], "2 of 3", "Describe."),
        (None, [], "2 of 3", "Describe."),
        (None, [], "2 of 3", "Describe."),
    ]


def late_reader():
    if dist.get_rank() > 0:
        # Main goes ahead; this rank comes when main has made all of its calls.
        dist.distributed_c10d._get_default_store().wait(["main is through"])
    values = [ddp.run_on_main(lambda n=n: n) for n in range(50)]
    if dist.get_rank() == 0:
        dist.distributed_c10d._get_default_store().set("main is through", "1")
    return values


def test_main_never_waits(ranks):
    assert ranks.run(late_reader, world_size=2) == [list(range(50))] * 2


# ------------------------------------------------------------------------------------------- errors


def boom():
    raise KeyError("the reason")


def failing():
    start = time.monotonic()
    try:
        ddp.run_on_main(boom)
    except (KeyError, MainProcessError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return None


def test_an_error_reaches_every_rank_at_once(ranks):
    results = ranks.run(failing, world_size=WORLD)
    assert results[0][:2] == ("KeyError", "'the reason'")
    for kind, text, seconds in results:
        assert seconds < 5.0 * PATIENCE
        if kind != "KeyError":
            assert kind == "MainProcessError"
            assert text.startswith("rank 0 failed in the call at test_main_only.py:")
            assert "in failing: KeyError: 'the reason'\n--- traceback of rank 0 ---\n" in text
            assert text.endswith("KeyError: 'the reason'")
            assert 'raise KeyError("the reason")' in text


def test_an_uncaught_error_fails_every_rank(ranks):
    outcomes = ranks.outcomes(ddp.run_on_main, boom, world_size=WORLD)
    assert [outcome.error_type for outcome in outcomes] == [
        "KeyError",
        "MainProcessError",
        "MainProcessError",
    ]


def caught(repeats):
    fresh()
    weights = torch.zeros(2)
    for number in range(repeats):
        try:
            ddp.run_on_main(boom)
            raise AssertionError
        except (KeyError, MainProcessError):
            pass
        assert ddp.run_on_main(counted) == number + 1
        weights += ddp.ddp_all_reduce(torch.full((2,), float(dist.get_rank() + number)))
        try:
            guarded()
            raise AssertionError
        except (ZeroDivisionError, MainProcessError):
            pass
    in_step()
    return weights.tolist()


@ddp.main_process_only
def guarded():
    return 1 / 0


@pytest.mark.costly
def test_caught_errors_leave_the_ranks_in_step(ranks):
    expected = [float(sum(3 + 3 * n for n in range(50)))] * 2
    assert ranks.run(caught, 50, world_size=WORLD) == [expected] * WORLD


def leaves(kind):
    try:
        ddp.run_on_main(functools.partial(raise_it, kind))
    except (kind, MainProcessError) as error:
        in_step()
        return type(error).__name__, str(error).splitlines()[0]
    return None


def raise_it(kind):
    raise kind("stop")


@pytest.mark.costly
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_even_what_is_no_exception_reaches_every_rank(ranks, kind):
    main, other = ranks.run(leaves, kind)
    assert main == (kind.__name__, "stop")
    assert other[0] == "MainProcessError"
    assert other[1].endswith(f"{kind.__name__}: stop")


def test_one_sided_errors_stay_with_main(ranks):
    assert ranks.run(one_sided_error) == [True, True]


def one_sided_error():
    if ddp.if_main_process():
        with pytest.raises(KeyError):
            ddp.run_on_main(boom)
    in_step()
    return True


# ------------------------------------------------------------------------------------------- values


class Awkward:
    """Pickles in its own way, or not at all."""

    def __init__(self, fault):
        self.fault = fault

    def __reduce__(self):
        if self.fault == "dump":
            raise RuntimeError("no way to write this")
        return _unwilling, ()


def _unwilling():
    if dist.get_rank() > 0:
        raise RuntimeError("no way to read this")


def awkward(make):
    with _records() as records:
        value = ddp.run_on_main(make)
        in_step()
    return value is None, [
        record.getMessage() for record in records if record.levelno == logging.WARNING
    ]


class _records(logging.Handler):
    def __enter__(self):
        self.records = []
        self.emit = self.records.append
        logging.getLogger("ddpkit").addHandler(self)
        return self.records

    def __exit__(self, *error):
        logging.getLogger("ddpkit").removeHandler(self)


def make_generator():
    return (n for n in range(3))


def make_lock():
    return threading.Lock()


@pytest.mark.costly
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (make_generator, "a generator,"),
        (make_lock, "a lock,"),
        (functools.partial(Awkward, "dump"), ("an? Awkward,")),
    ],
)
def test_a_value_that_does_not_pickle(ranks, make, what):
    (main_none, main_said), (other_none, other_said) = ranks.run(awkward, make)
    assert (main_none, other_none) == (False, True)
    assert other_said == []
    (warning,) = main_said
    assert "test_main_only.py:" in warning
    assert "in awkward: the value of this main-only call" in warning
    assert what.replace("an?", "a") in warning
    assert "they get None" in warning


def test_a_value_that_does_not_unpickle(ranks):
    (main_none, main_said), (other_none, other_said) = ranks.run(
        awkward,
        functools.partial(Awkward, "load"),
    )
    assert (main_none, other_none, main_said) == (False, True, [])
    (warning,) = other_said
    assert (
        "cannot be read on rank 1 (RuntimeError: no way to read this), which gets None" in warning
    )


def big(size):
    value = ddp.run_on_main(functools.partial(os.urandom, size))
    return len(value), hash(value) == hash(ddp.ddp_broadcast(value))


@pytest.mark.costly
def test_a_value_of_20_mb(ranks):
    assert ranks.run(big, 20_000_000) == [(20_000_000, True)] * 2


# ----------------------------------------------------------------------------- arguments, post_func


def with_post(run_post_on_main):
    done = []
    value = ddp.run_on_main(
        lambda *args, **kwargs: (args, kwargs),
        args=[1, 2],
        kwargs={"a": 3},
        post_func=lambda *args, **kwargs: done.append((args, kwargs)),
        post_args=[4],
        post_kwargs={"b": 5},
        run_post_on_main=run_post_on_main,
    )
    return value, done


@pytest.mark.costly
@pytest.mark.parametrize("run_post_on_main", [False, True])
def test_post_func(ranks, run_post_on_main):
    value = ((1, 2), {"a": 3})
    post = ((4,), {"b": 5})
    main, other = ranks.run(with_post, run_post_on_main)
    assert main == (value, [post] if run_post_on_main else [])
    assert other == (value, [post])


def failing_work_with_post(done):
    try:
        ddp.run_on_main(boom, post_func=lambda: done.append(1), run_post_on_main=True)
    except (KeyError, MainProcessError):
        return done
    return None


def test_post_func_does_not_run_after_a_failure(ranks):
    assert ranks.run(failing_work_with_post, []) == [[], []]


def post_talks():
    """The post function runs on every rank where it runs, so what it does must be possible
    there.
    """
    return ddp.run_on_main(counted, post_func=in_step, run_post_on_main=True) is not None


def test_post_func_may_use_collectives(ranks):
    assert ranks.run(post_talks) == [True, True]


# ------------------------------------------------------------------------------------ once per node


def work_of_the_node():
    info = [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")]
    value = ddp.run_once_per_node(lambda: f"node {info[2]}")
    guarded = ddp.once_per_node(dist.get_rank)()
    try:
        failed = ddp.run_once_per_node(boom)
    except KeyError:
        failed = "KeyError"
    except RankFailedError as error:
        failed = str(error).split(" in the call")[0]
    post = ddp.run_once_per_node(counted, post_func=lambda: "post")
    in_step()
    return value, guarded, failed, post if isinstance(post, str) else "own"


def as_two_nodes():
    """Three ranks on two nodes: ranks 0 and 1, and rank 2 alone."""
    rank = int(os.environ["RANK"])
    os.environ |= {
        "LOCAL_RANK": str(rank % 2), "GROUP_RANK": str(rank // 2),
        "LOCAL_WORLD_SIZE": str(1 if rank == 2 else 2),
    }  # fmt: skip
    return work_of_the_node()


def test_once_per_node(ranks):
    assert ranks.run(as_two_nodes, world_size=3) == [
        ("node 0", 0, "KeyError", "own"),
        ("node 0", None, "rank 0 failed", "post"),
        ("node 1", 2, "KeyError", "own"),
    ]


def as_two_nodes_that_nobody_counts():
    """As on Azure ML, but for NODE_RANK: ranks 0 and 1 on a node, and rank 2 alone."""
    rank = int(os.environ["RANK"])
    del os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"]
    os.environ["LOCAL_RANK"] = str(rank % 2)
    ddp.ddp_init_group({"device": "cpu"})
    learned = [os.environ[name] for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE")]
    values = ddp.run_once_per_node(dist.get_rank), ddp.run_once_per_node(lambda: rank + 10)
    in_step()
    return *learned, *values


def test_how_many_ranks_a_node_has_is_learned_where_no_launcher_says_it(ranks):
    assert ranks.run(as_two_nodes_that_nobody_counts, init=False, world_size=3) == [
        ("0", "2", 0, 10),
        ("0", "2", 0, 10),
        ("1", "1", 2, 12),
    ]


def as_two_nodes_that_take_ranks_in_turn():
    """Ranks 0 and 2 are on a node, and ranks 1 and 3: they cannot tell."""
    rank = int(os.environ["RANK"])
    del os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_RANK"]
    os.environ["LOCAL_RANK"] = str(rank // 2)
    ddp.ddp_init_group({"device": "cpu"})
    return [os.environ.get(name) for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE")]


@pytest.mark.costly
def test_nothing_is_learned_of_ranks_that_are_not_numbered_node_by_node(ranks):
    learned = ranks.run(as_two_nodes_that_take_ranks_in_turn, init=False, world_size=4)
    assert learned == [[None, None]] * 4


# ------------------------------------------------------------------------------------- collectives


def collectives():
    rank = dist.get_rank()
    world = dist.get_world_size()
    ddp.ddp_barrier()
    assert ddp.ddp_broadcast({"from": rank}, src=1) == {"from": 1}
    tensor = torch.full((2,), rank + 1.0)
    assert ddp.ddp_all_reduce(tensor) is tensor
    assert tensor.tolist() == [sum(range(1, world + 1))] * 2
    assert ddp.ddp_all_reduce(torch.tensor([rank]), ddp.ReduceOp.MAX).tolist() == [world - 1]
    assert ddp.sum_over_ranks([0.5, float(rank)]) == [0.5 * world, sum(range(world))]
    many = [float(number) for number in range(40)]
    assert ddp.sum_over_ranks(many) == [world * number for number in many]
    assert ddp.exchange({"rank": rank, "pad": "x" * rank * 1000}) == [
        {"rank": other, "pad": "x" * other * 1000} for other in range(world)
    ]
    return True


def test_collectives(ranks):
    assert ranks.run(collectives, world_size=WORLD) == [True] * WORLD


def main_only_collectives():
    ddp.ddp_barrier()
    kept = ddp.ddp_broadcast("own", src=1)
    try:
        ddp.ddp_all_reduce(torch.ones(1))
    except LaunchError as error:
        return kept, str(error)
    return None


def collectives_inside():
    value = ddp.run_on_main(main_only_collectives)
    in_step()
    return value


def test_collectives_inside_main_only_code(ranks):
    for kept, text in ranks.run(collectives_inside):
        assert kept == "own"
        assert "ddp_all_reduce was called inside main-only code" in text
        assert "Reduce before" in text


def environment_only():
    assert not dist.is_initialized()
    done = [
        ddp.if_main_process(),
        ddp.get_rank(),
        ddp.rank_prefixed_message("x"),
        ddp.get_world_size(),
    ]
    done += [ddp.main_process_only(lambda: "ran")(), ddp.exchange(1), ddp.ddp_broadcast("own")]
    ddp.ddp_barrier()
    return done


def test_before_the_group_starts_the_environment_counts(ranks):
    main, other = ranks.run(environment_only, init=False)
    assert main == [True, 0, "[rank: 0] x", 1, "ran", [1], "own"]
    assert other == [False, 1, "[rank: 1] x", 1, None, [1], "own"]


# ----------------------------------------------------------------------------- long work, the store


def long_work(seconds):
    ddp.ddp_init_group({"device": "cpu"})
    shorten_timeout(4.0)  # not before: a loaded machine may need longer to join
    start = time.monotonic()
    value = ddp.run_on_main(lambda: time.sleep(seconds) or "done")
    waited = time.monotonic() - start
    ddp.ddp_barrier()
    return value, waited


@pytest.mark.costly
def test_main_only_work_longer_than_the_timeout_of_the_group(ranks):
    for value, waited in ranks.run(long_work, 8.0, init=False):
        assert value == "done"
        assert 4.0 < waited < 10.0 * PATIENCE


def keys_after(calls):
    store = dist.distributed_c10d._get_default_store()

    def once():
        ddp.run_on_main(lambda: b"x" * 10)
        if ddp.if_main_process():
            ddp.run_on_main(lambda: b"y" * 10)  # read by nobody
        ddp.exchange("z")
        ddp.sum_over_ranks([1.0])

    sizes = []
    for number in range(calls):
        once()
        if number in {2, calls - 1}:
            ddp.ddp_barrier()
            sizes.append(store.num_keys())
            ddp.ddp_barrier()
    return sizes


@pytest.mark.costly
def test_the_store_does_not_grow(ranks):
    for early, late in ranks.run(keys_after, 40, world_size=WORLD):
        assert late == early


def over_a_file(path):
    """A group that the user has made, without a TCP store."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    in_step()
    return both_ways(), failing()[0], ddp.exchange(rank)


def test_a_group_over_a_file(ranks, tmp_path):
    (main, main_error, everybody), (other, other_error, _) = ranks.run(
        over_a_file,
        str(tmp_path / "store"),
        init=False,
    )
    assert (main, other) == ([1, 2, 3], [1, 3])
    assert (main_error, other_error) == ("KeyError", "MainProcessError")
    assert everybody == [0, 1]


def once_per_machine(path):
    """In a group without a launcher; of three ranks the first and the last are on one machine."""
    rank = int(os.environ["RANK"])
    launched = {name: os.environ.pop(name) for name in [*os.environ] if name in LAUNCHED}
    place = node_work.this_place
    node_work.this_place = lambda: (f"host{rank % 2}", "", "")
    try:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
        before = ddp.get_local_rank()
        values = [
            ddp.run_once_per_node(dist.get_rank, post_func=post) for post in (None, lambda: "after")
        ]
        error = outcome_of(lambda: ddp.run_once_per_node(fail_on_the_second))
        in_step()
        local = ddp.get_local_rank(), ddp.is_local_rank_zero()
        dist.destroy_process_group()
        return before, values, error, *local, ddp.get_local_rank()
    finally:
        node_work.this_place = place
        os.environ.update(launched)


LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def fail_on_the_second():
    if dist.get_rank() == 1:
        raise KeyError("full")
    return "fine"


def outcome_of(call):
    try:
        return call()
    except (KeyError, RankFailedError) as error:
        return type(error).__name__


def test_in_a_group_without_a_launcher_the_ranks_find_out_who_shares_a_machine(ranks, tmp_path):
    assert ranks.run(once_per_machine, str(tmp_path / "store"), init=False, world_size=3) == [
        (None, [0, 0], "fine", 0, True, None),
        (None, [1, 1], "KeyError", 0, True, None),
        (None, [0, "after"], "fine", 1, False, None),
    ]


def alone_in_its_launcher():
    """A launcher has started one process, and that one the ranks."""
    launched = {name: os.environ.get(name) for name in LAUNCHED}
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    try:
        return ddp.run_once_per_node(dist.get_rank), ddp.get_local_rank()
    finally:
        for name, value in launched.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


def test_ranks_inside_of_a_single_process_of_a_launcher(ranks):
    assert ranks.run(alone_in_its_launcher) == [(0, 0), (0, 1)]


def peer_dies():
    if dist.get_rank() == 0:
        os._exit(3)
    return ddp.run_on_main(counted)


@pytest.mark.slow
def test_the_pool_itself_reports_a_rank_that_dies(ranks):
    with pytest.raises(RankPoolError) as caught:
        ranks.run(peer_dies, timeout=8)
    assert [outcome.error_type for outcome in caught.value.outcomes] == ["Died", "Hang"]
    assert caught.value.outcomes[0].error == "exit code 3"


def test_errors_pickle():
    error = pickle.loads(pickle.dumps(MainProcessError("words")))
    assert (type(error), str(error)) == (MainProcessError, "words")


# ----------------------------------------------------------------------------------- main goes away

SCRIPT = """\
import os, sys, time
from ddpkit.comm import group_end, process_group
from ddpkit.distributed import ddp_init_group, if_main_process, run_on_main

group_end.FINAL_REPORT_SECONDS = 60.0
group_end.DEPARTURE_SECONDS = process_group.DEPARTURE_SECONDS = 60.0  # on a busy machine
ddp_init_group({"device": "cpu"})
run_on_main(int)
if if_main_process():
    while not os.path.exists("reader.is.here"):
        time.sleep(0.01)
    MAIN_LEAVES
open("reader.is.here", "w").close()
start = time.monotonic()
try:
    run_on_main(int)
finally:
    open("seconds", "w").write(str(time.monotonic() - start))
"""


@pytest.mark.corner
@pytest.mark.parametrize(
    ("leaves", "says"),
    [
        (
            "sys.exit(0)",
            (
                "waits at train.py:16 in <module> for rank 0, which has come to its end without "
                "making this"
            ),
        ),
        (
            "raise ValueError('the reason')",
            (") failed first, at train.py:12 in <module>: ValueError: the reason"),
        ),
        ("os._exit(1)", "disappeared: it was lost with the store on 127.0.0.1"),
    ],
    ids=["exit", "error", "killed"],
)
def test_a_main_that_goes_away_is_noticed(tmp_path, leaves, says):
    """Without torchrun, which would end the others, and with no collective that could break."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("MAIN_LEAVES", leaves))
    main, other = start_by_hand(python(str(script)), tmp_path, 2, warm=True)
    main.wait(20)
    other.wait(10)
    assert main.code == (0 if "exit(0)" in leaves else 1)
    assert other.code == 1
    # torch may tell of the lost store after it
    told = [line for line in other.lines if line.startswith("[rank1]: ")]
    assert says in "\n".join(told[-3:]), other.err
    assert "RankFailedError" in "\n".join(told[-3:])
    assert float((tmp_path / "seconds").read_text()) < 2.0 * PATIENCE
    assert len(told) < 20


def test_under_torchrun_the_reason_stands_last(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.partition("run_on_main(int)")[0] + "run_on_main(lambda: 1 / 0)\n")
    run = Run(torchrun(2, str(script)), tmp_path, warm=True).wait(30)
    assert run.code == 1
    assert "rank      : 0 (local_rank: 0)" in run.err.rpartition("Root Cause")[2]
    assert re.search(
        r"\[rank0\]: rank 0 .* failed first, at .*: ZeroDivisionError: division by "
        r"zero",
        run.tail(3),
    )


def _one_sided_first():
    seen = []
    for epoch in range(1, 4):
        if ddp.if_main_process() or epoch > 1:
            seen.append(ddp.run_on_main(lambda: f"epoch {epoch}"))  # noqa: B023 -- called at once
        ddp.ddp_barrier()
    return seen[-2:]


def test_a_one_sided_call_does_not_shift_the_calls_after_a_collective(ranks):
    """One line, first for the main process alone and then for all: the values must not lag
    behind.
    """
    assert ranks.run(_one_sided_first) == [["epoch 2", "epoch 3"]] * 2
