"""How fit and evaluate begin on real ranks: every difference is told on all of them, and a person
sees one block.
"""

from __future__ import annotations

import textwrap
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from ddpkit import distributed
from ddpkit.base import host_name
from ddpkit.brain import run_of
from ddpkit.comm import agreement
from ddpkit.distributed import exchange
from ddpkit.run import preflight
from tests.launching import PATIENCE, Run, free_port, python, torchrun
from tests.recipes import QUIET, Regression, make, points, sgd, weights

LIMIT_SECONDS = 20
WORLDS = [(2, 0), (2, 1), pytest.param(3, 1, marks=pytest.mark.slow), (3, 2)]


def assert_told(outcomes, *words):
    """Every rank raised the same, and says these words."""
    assert [outcome.error_type for outcome in outcomes] == ["RankMismatchError"] * len(outcomes), (
        outcomes
    )
    assert len({outcome.error for outcome in outcomes}) == 1
    for word in (
        *words,
        "The ranks are not about to run the same training:",
        ("Start every rank with the same script"),
    ):
        assert word in outcomes[0].error, outcomes[0].error


def on(world, odd):
    """Write where most are, and where the odd one is, as the message does."""
    most = [rank for rank in range(world) if rank != odd]
    are_neighbours = most[-1] - most[0] == len(most) - 1
    several = f"ranks {most[0]}{'-' if are_neighbours else ', '}{most[-1]}"
    return f"rank {most[0]}" if len(most) == 1 else several, f"rank {odd}"


# ----------------------------------------------------------------- differences in one process group


class Untouched(Regression):
    """Nothing of a recipe may have run when the ranks find out that they differ."""

    def make_dataloader(self, *args, **kwargs):
        raise AssertionError("too late")

    def on_fit_start(self):
        raise AssertionError("too late")


def other_model(odd):
    width = 4 if dist.get_rank() == odd else 3
    brain = Untouched({"net": nn.Linear(width, 1)}, sgd(), run_opts=QUIET)
    brain.fit([1], points(4))


@pytest.mark.corner
@pytest.mark.parametrize(("world", "odd"), WORLDS)
def test_a_rank_with_another_model(ranks, world, odd):
    most, one = on(world, odd)
    outcomes = ranks.outcomes(other_model, odd, world_size=world, timeout=LIMIT_SECONDS)
    assert_told(
        outcomes,
        "(1, 3) torch.float32 trained on " + most,
        ("(1, 4) torch.float32 trained on ") + one,
    )
    assert (
        f"rank {odd} is on {agreement.process_label().split(' ', maxsplit=1)[0]} (pid "
        in outcomes[0].error
    )


def two_paths(odd):
    brain = make(Untouched)

    def go():
        brain.fit([1], points(4))

    if dist.get_rank() == odd:
        go()
    else:
        go()


def test_a_rank_on_another_path_to_the_same_line(ranks):
    outcomes = ranks.outcomes(two_paths, 1, world_size=2, timeout=LIMIT_SECONDS)
    first = two_paths.__code__.co_firstlineno
    paths = [
        f"fit at test_preflight.py:{first + 4} in go, from test_preflight.py:{first + n} in"
        for n in (9, 7)
    ]
    assert_told(outcomes, *paths)


def other_option(odd, option, value):
    brain = make(Untouched, **({option: value} if dist.get_rank() == odd else {}))
    brain.fit([1], points(4))
    brain.evaluate(points(4))


@pytest.mark.corner
@pytest.mark.parametrize(("world", "odd"), WORLDS)
@pytest.mark.parametrize(
    ("option", "value"),
    [("max_grad_norm", 1.0), ("test_only", True), ("global_batch_size", 8)],
)
def test_a_rank_with_another_option(ranks, world, odd, option, value):
    """With test_only the rank does not even train: its evaluate meets the others' fit, where they
    compare.
    """
    outcomes = ranks.outcomes(
        other_option,
        odd,
        option,
        value,
        world_size=world,
        timeout=LIMIT_SECONDS,
    )
    assert_told(outcomes, f"  option {option}: ", f"{value} on rank {odd}")


def shown_on_main_only():
    brain = make(noprogressbar=dist.get_rank() > 0, tqdm_colored_bar=dist.get_rank() == 0)
    brain.fit([1], points(4), train_loader_kwargs={"batch_size": 2})
    return brain.optimizer_step


def test_what_only_the_main_process_shows_may_differ(ranks):
    assert ranks.run(shown_on_main_only) == [1, 1]


def other_class(odd):
    brain = make(Other if dist.get_rank() == odd else Untouched)
    brain.fit([1], points(4))


class Other(Untouched):
    pass


@pytest.mark.parametrize(("world", "odd"), [(2, 1), (3, 0)])
def test_a_rank_with_another_brain(ranks, world, odd):
    outcomes = ranks.outcomes(other_class, odd, world_size=world, timeout=LIMIT_SECONDS)
    assert_told(outcomes, "  Brain: ", f"Other on rank {odd}")


def other_checkpointer(folder):
    brain = make(Untouched, folder=folder if dist.get_rank() else None)
    brain.fit([1], points(4))


def test_a_checkpointer_on_one_rank(ranks, tmp_path):
    outcomes = ranks.outcomes(other_checkpointer, str(tmp_path), timeout=LIMIT_SECONDS)
    assert_told(outcomes, "checkpointer: none on rank 0; Checkpointer on rank 1")


def other_path(odd):
    brain = make(Untouched)
    if dist.get_rank() == odd:
        brain.fit([1], points(4))
    else:
        brain.fit([1], points(4))


@pytest.mark.parametrize(("world", "odd"), [(2, 0), (3, 2)])
def test_a_rank_on_another_path_through_the_script(ranks, world, odd):
    """All that follows in fit is called from another line, and would wait for the others for
    ever.
    """
    most, one = on(world, odd)
    outcomes = ranks.outcomes(other_path, odd, world_size=world, timeout=LIMIT_SECONDS)
    assert_told(
        outcomes,
        "  call: fit at test_preflight.py:",
        "in other_path",
        f"on {most}",
        f"on {one}",
    )


def other_data(odd, where):
    data = points(8)
    own = points(10) if dist.get_rank() == odd else data
    brain = make()
    sets = {"train": data, "valid": data, "test": data, where: own}
    if where != "test":
        brain.fit([1], sets["train"], sets["valid"], train_loader_kwargs={"batch_size": 2})
    brain.evaluate(sets["test"])


@pytest.mark.corner
@pytest.mark.parametrize(("world", "odd"), WORLDS)
@pytest.mark.parametrize("where", ["train", "valid", "test"])
def test_a_rank_with_a_dataset_of_another_length(ranks, world, odd, where):
    most, one = on(world, odd)
    outcomes = ranks.outcomes(other_data, odd, where, world_size=world, timeout=LIMIT_SECONDS)
    values = [f"8 on {most}", f"10 on {one}"]
    assert_told(outcomes, f"  {where} samples: " + "; ".join(values if odd else values[::-1]))


class DividedByHand(Regression):
    """A recipe that gives each rank a loader of its own, over samples of its own."""

    def make_dataloader(self, dataset, stage, **kwargs):
        kwargs.pop("ckpt_prefix", None)
        return DataLoader(dataset, **kwargs)


def divided_by_hand():
    rank = dist.get_rank()
    world = dist.get_world_size()
    brain = make(DividedByHand, shard_evaluation=True)
    data = points(9)[rank::world]
    valid = points(7)[rank::world]
    brain.fit([1], data[:4], valid, train_loader_kwargs={"batch_size": 2})
    return brain.optimizer_step, len(valid), brain.evaluate(valid)


def test_sets_that_a_recipe_has_divided_itself_may_have_other_lengths(ranks):
    results = ranks.run(divided_by_hand)
    assert [result[:2] for result in results] == [(2, 4), (2, 3)]
    assert results[0][2] == results[1][2]


# ------------------------------------------------------------------------------------ what it costs


def counted():
    calls = []
    real = distributed.exchange

    def count(value, site=None):
        calls.append(site)
        return real(value, site)

    agreement.exchange = count
    # Ranks of the pool may have imported other files, which is looked at in detail and no
    # difference.
    code_facts = agreement.code_facts
    agreement.code_facts = dict
    try:
        brain = make()
        brain.fit([1], points(4), train_loader_kwargs={"batch_size": 1})
        brain.fit([1], points(4), train_loader_kwargs={"batch_size": 1})
    finally:
        agreement.exchange = real
        agreement.code_facts = code_facts
    return (
        calls.count(preflight.AT_START),
        sum(site is not None and "detail" in site for site in calls),
        run_of(brain).preflight.places,
    )


@pytest.mark.costly
def test_the_ranks_exchange_one_digest_and_where_they_are(ranks):
    """Once per call of fit; and nothing longer as long as they agree."""
    for found, details, places in ranks.run(counted, world_size=3):
        assert (found, details) == (2, 0)
        assert [(one.node, one.host, one.device.split()[0]) for one in places] == [
            (0, host_name(), "cpu")
        ] * 3


def seconds_of_a_start():
    brain = make()
    exchange("all are here", "warm")
    started = time.perf_counter()
    run_of(brain).preflight.compare_ranks("fit", type(brain))
    return time.perf_counter() - started


@pytest.mark.slow
def test_a_start_is_not_held_up(ranks):
    """Measured 4 ms; the limit leaves room for a busy machine."""
    best = min(max(ranks.run(seconds_of_a_start)) for _ in range(5))
    assert best < 0.1 * PATIENCE


# ------------------------------------------------------------------------------- what a person sees

RECIPE = """
    import sys
    import torch
    import ddpkit as sb
    from nets import Net

    class Line(sb.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            return (predictions - batch[1]).square().mean()

    if __name__ == "__main__":
        file, run_opts, _ = sb.parse_arguments(["h.yaml", "--device=cpu", *sys.argv[1:]])
        if "early" in open("when").read():
            sb.ddp_init_group(run_opts)
            sb.run_on_main(print, args=["prepared"])
        data = [(torch.tensor([float(x)]), torch.tensor([2.0 * x])) for x in range(12)]
        net = Net()
        checkpointer = sb.checkpoints.Checkpointer("save", {"net": net})
        brain = Line({"net": net}, lambda p: torch.optim.SGD(p, lr=0.001), {"lr": 1}, run_opts, checkpointer)
        counter = sb.epoch_loop.EpochCounter(2)
        checkpointer.add_recoverable("counter", counter)
        brain.fit(counter, data, data, train_loader_kwargs={"batch_size": 3}, progressbar=False)
        checkpointer.save_checkpoint()
        brain.evaluate(data, progressbar=False, test_loader_kwargs={"batch_size": 5})
        brain.evaluate(data, progressbar=False, test_loader_kwargs={"batch_size": 5})
"""  # noqa: E501
NET = """
    import torch

    class Net(torch.nn.Linear):
        def __init__(self):
            super().__init__(1, 1)
"""


def write(folder, *, when="early", script=RECIPE, net=NET, yaml="lr: 1\n"):
    folder.mkdir(exist_ok=True)
    for name, text in (("train.py", script), ("nets.py", net), ("h.yaml", yaml), ("when", when)):
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def blocks(text):
    """Return the blocks of a run, and how many other lines there are."""
    found = {}
    rest = []
    name = ""
    for line in text.splitlines():
        if line.endswith(":") and " with ddpkit " in line:
            title = found.setdefault(line.split()[0], {})
        elif line.startswith("  ") and found:
            name = line[2:13].strip() or name
            assert line[2:13].strip() not in title, "once"
            title[name] = f"{title[name]} {line[13:]}" if name in title else line[13:]
        else:
            rest.append(line)
    return found, rest


@pytest.mark.slow
def test_one_block_on_two_processes_then_resumed_on_one(tmp_path):
    write(tmp_path)
    run = Run(torchrun(2, "train.py", "--precision=bf16"), tmp_path, warm=True).wait()
    assert run.code == 0, run.err
    found, rest = blocks(run.err)
    clipped = (
        "epoch 1: the gradients of 2 of 2 optimizer steps were clipped to norm 5.0 "
        "(--max_grad_norm)."
    )
    assert rest[0] == clipped, run.err
    assert [line.partition(":")[0] for line in rest[1:]] == [
        ("A checkpointer was given and fit has saved nothing")
    ]
    host = agreement.process_label().split()[0]
    assert {name: row for name, row in found["Training"].items() if name != "versions"} == {
        "launcher": f"torchrun, 2 processes on {host}",
        "devices": "2 x cpu (1 thread), backend gloo",
        "strategy": "ddp: each process holds the whole model",
        "batch": (
            "2 processes x batch 3 x accumulation 1 = 6 samples per optimizer step; 2 steps, 12 "
            "samples per epoch"
        ),
        "per step": (
            "6 samples; one process has 3: --global_batch_size=3 trains as one process does"
        ),
        "epochs": "2 in all, 4 optimizer steps",
        "valid set": "12 samples, all per process in 12 batches of 1",
        "optimizer": "SGD, lr 0.001",
        "clipping": "gradient norm at most 5.0 (--max_grad_norm)",
        "precision": "bf16, evaluation fp32",
        "evaluation": "every rank the whole set; --shard_evaluation divides it",
        "start": "from scratch: there is no checkpoint in save",
    }
    (saved,) = (tmp_path / "save").glob("CKPT+*")
    assert found["Evaluation"] == {
        "test set": "12 samples, all per process in 3 batches of 5",
        "precision": "fp32",
        "weights": f"from save/{saved.name}",
    }
    assert run.out == "prepared\n"
    assert len(run.err.splitlines()) <= 24

    (tmp_path / "train.py").write_text(
        (tmp_path / "train.py").read_text().replace("EpochCounter(2)", "EpochCounter(3)")
    )
    run = Run(python("train.py", "--shard_evaluation"), tmp_path, warm=True).wait()
    assert run.code == 0, run.err
    found, _ = blocks(run.err)
    assert found["Training"]["launcher"] == f"none, one process on {host}"
    assert found["Training"]["devices"] == "cpu (1 thread)"
    assert found["Training"]["start"] == (
        f"from save/{saved.name}: 4 optimizer steps done, epoch 2 is over"
    )
    assert not {"evaluation", "per step"} & set(found["Training"])


def strategies_told(given):
    told = []
    for options in given:
        brain = make(
            net=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double(),
            **options,
        )
        brain.fit([1], points(8), train_loader_kwargs={"batch_size": 2})
        report = run_of(brain).preflight.report
        told.append({} if report is None else report.said)
    return [(rows.get("strategy"), rows.get("batch norm")) for rows in told]


@pytest.mark.slow
def test_the_strategy_and_what_batch_norm_normalises_over_are_said(ranks):
    shared = "over the rows of all processes (--sync_batchnorm="
    given = {
        ("ddp: each process holds the whole model", f"{shared}auto)"): {"sync_batchnorm": "auto"},
        ("ddp: each process holds the whole model", f"{shared}on)"): {
            "strategy": "ddp",
            "sync_batchnorm": True,
        },
        (
            "zero1: each process holds the whole model, and a part of the optimizers' state",
            f"{shared}auto)",
        ): {"strategy": "zero1"},
        ("fsdp: each process holds 1/2 of the weights, in 3 block(s)", f"{shared}auto)"): {
            "strategy": "fsdp",
            "fsdp_blocks": "Linear",
        },
        (
            "virtual ranks: 4, 2 on each process (--virtual_ranks)",
            ("each virtual rank by its own rows"),
        ): {"virtual_ranks": 4},
    }
    assert ranks.run(strategies_told, list(given.values()))[0] == list(given)


def test_one_process_says_that_it_is_one():
    assert strategies_told([{}, {"strategy": "zero1"}]) == [
        ("single: one process", None),
        ("single: one process", None),
    ]


def train_as_advised():
    brain = make()
    alone = 2
    brain.fit([1], points(9), train_loader_kwargs={"batch_size": 2})
    advice = (
        ""
        if run_of(brain).preflight.report is None
        else run_of(brain).preflight.report.said[("per step")]
    )
    same = make(global_batch_size=alone)
    same.fit([1], points(9))
    said = (
        ""
        if run_of(same).preflight.report is None
        else run_of(same).preflight.report.said.get("per step", "")
    )
    return advice, said, weights(same)


def advice_of_local_sgd():
    brain = make(ddp_comm_hook="post_local_sgd", local_sgd_period=2)
    brain.fit([1], points(9), train_loader_kwargs={"batch_size": 2})
    return (
        ""
        if run_of(brain).preflight.report is None
        else run_of(brain).preflight.report.said.get("per step", "")
    )


def test_no_size_is_said_to_keep_a_training_that_depends_on_the_number_of_processes(ranks):
    assert ranks.run(advice_of_local_sgd) == ["", ""]


@pytest.mark.costly
def test_what_keeps_the_training_of_one_process_is_said_and_true(ranks):
    (advice, said, found), _ = ranks.run(train_as_advised)
    assert advice == (
        "4 samples; one process has 2: --global_batch_size=2 trains as one process does"
    )
    assert said == "", "it is followed already"
    one = make()
    one.fit([1], points(9), train_loader_kwargs={"batch_size": 2})
    for name, value in weights(one).items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_a_second_fit_says_what_has_changed_and_nothing_else(caplog):
    """In one process; nothing is compared there, and the place of a Brain that trains on is no
    news.
    """
    caplog.set_level("INFO", logger="ddpkit.run.preflight")

    def said():
        blocks = [
            record.getMessage()
            for record in caplog.records
            if record.name == "ddpkit.run.preflight"
        ]
        caplog.clear()
        return [block.splitlines() for block in blocks]

    brain = make()
    data = points(8)
    for batch_size in (2, 2, 4):
        brain.fit([1], data, train_loader_kwargs={"batch_size": batch_size})
    first, second = said()
    assert first[-1] == "  start      from scratch, and no checkpointer to save with"
    assert not any(line.startswith("  evaluation") for line in first)
    assert second[1:] == [
        "  batch      1 process x batch 4 x accumulation 1 = 4 samples per optimizer",
        "             step; 2 steps, 8 samples per epoch",
        "  epochs     1 in all, 2 optimizer steps",
    ]
    for _ in range(2):
        brain.evaluate(data, test_loader_kwargs={"batch_size": 3})
    (only,) = said()
    assert only[1:] == [
        "  test set   8 samples in 3 batches of 3",
        "  weights    as training has left them",
    ]
    make().evaluate(iter(data))
    (only,) = said()
    assert only[4:] == [
        "  test set   a stream",
        "  precision  float64",
        "  weights    the initial ones: no checkpoint was loaded",
    ]


def start_two(first, second, *words):
    """Start two ranks by hand, each in a folder of its own; rank 0 keeps the store."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = python("train.py", *words)
    runs = [
        Run(command, folder, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, warm=True)
        for rank, folder in enumerate((first, second))
    ]
    return [run.wait(30) for run in runs]


@pytest.mark.corner
@pytest.mark.parametrize(
    ("what", "when", "line"),
    [
        ({"script": RECIPE + "    # as it was yesterday\n"}, "early", "  script: train.py (code "),
        ({"script": RECIPE + "    # as it was yesterday\n"}, "late", "  script: train.py (code "),
        ({"net": NET + "    # as it was yesterday\n"}, "early", "  module nets: nets.py (code "),
        ({"yaml": "lr: 2\n"}, "early", "  hyperparameter file: content "),
    ],
    ids=["script", "script of a Brain alone", "module", "yaml"],
)
def test_two_versions_of_a_recipe(tmp_path, what, when, line):
    """Told on both, within seconds and as the last thing on the screen, whether they would have
    waited or not.
    """
    runs = start_two(write(tmp_path / "one", when=when), write(tmp_path / "two", when=when, **what))
    for run in runs:
        assert run.code == 1, run.err
        tail = run.tail(6)
        assert f"{line}" in tail
        assert " on rank 0; " in tail
        assert (
            f"rank 0 is on {agreement.process_label().split()[0]} (pid {runs[0].process.pid})"
            in tail
        )
        assert tail.endswith(
            "Start every rank with the same script, the same command line and the same data."
        )
        assert run.seconds < 20 * PATIENCE


# Rank 0, which has torch's store, is the last to end.
LAST = """
    import atexit, os, pathlib, time

    def be_last():
        ended = pathlib.Path("../ended")
        if os.environ["RANK"] == "1":
            ended.touch()
        for _ in range(600):
            if not ended.exists():
                time.sleep(0.1)

    atexit.register(be_last)
"""


def test_two_versions_of_a_script_in_a_group_of_the_users_own(tmp_path):
    """Nobody has compared them before fit."""
    own = "import torch.distributed as dist; dist.init_process_group('gloo'); file, run_opts,"
    script = LAST + RECIPE.replace("file, run_opts,", own)
    other = write(tmp_path / "two", when="late", script=script + "    # as it was yesterday\n")
    for run in start_two(write(tmp_path / "one", when="late", script=script), other):
        assert run.code == 1
        assert "  script: train.py (code " in run.tail(6)


def test_two_versions_of_torch(tmp_path):
    """Of numpy, too, and of Python: as if one machine had another environment."""
    lie = "import torch, numpy; torch.__version__ = '1.13.1'; numpy.__version__ = '1.20'\n"
    other = {"script": RECIPE}
    first = write(tmp_path / "one")
    second = write(tmp_path / "two", **other)
    (second / "nets.py").write_text(lie + textwrap.dedent(NET))
    for run in start_two(first, second):
        assert run.code == 1
        assert "  torch: 2." in run.tail(8)
        assert " on rank 0; 1.13.1 on rank 1" in run.tail(8)
        assert "  numpy: " in run.tail(8)
        assert "Install the same versions on every machine" in run.tail(8)


def test_two_backends_and_two_numbers_of_processes(tmp_path):
    """Found before the process group is made, which would not come about."""
    script = textwrap.dedent(RECIPE).replace(
        "file, run_opts,",
        'import os; os.environ["WORLD_SIZE"] = str(2 + int(os.environ["RANK"])); file, run_opts,',
    )
    script = script.replace(
        "sb.ddp_init_group(run_opts)",
        'sb.ddp_init_group({"distributed_backend": BACKEND[rank]})',
    )
    script = script.replace(
        "file, run_opts,",
        'BACKEND = ["gloo", "cpu:gloo"]; rank = int(os.environ["RANK"]); file, run_opts,',
    )
    first = write(tmp_path / "one", script=script)
    second = write(tmp_path / "two", script=script)
    for run in start_two(first, second):
        assert run.code == 1
        assert "  number of processes: 2 on rank 0; 3 on rank 1" in run.tail(8)
        assert "  backend: gloo on rank 0; cpu:gloo on rank 1" in run.tail(8)


@pytest.mark.slow
def test_a_file_that_the_main_process_alone_imports_is_no_difference(tmp_path):
    script = RECIPE.replace(
        "net = Net()",
        "net = Net()\n        if sb.if_main_process():\n            import plots",
    )
    write(tmp_path, script=script)
    (tmp_path / "plots.py").write_text("")
    run = Run(torchrun(2, "train.py"), tmp_path, warm=True).wait()
    assert run.code == 0, run.err
    assert "Training with ddpkit" in run.err


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_under_torchrun_the_reason_stands_in_its_summary(tmp_path, processes):
    script = RECIPE.replace("x in range(12)", "x in range(12 + (sb.distributed.get_rank() == 1))")
    write(tmp_path, script=script)
    run = Run(torchrun(processes, "train.py"), tmp_path, warm=True).wait()
    assert run.code == 1
    most = "rank 0" if processes == 2 else "ranks 0, 2"
    assert f"  train samples: 12 on {most}; 13 on rank 1" in run.tail(8)
    assert "Training with ddpkit" not in run.err, "nothing is announced that does not begin"


def rows_of_ranks(samples, options):
    """Return two rows of the block, and how many rows of the valid set this rank has evaluated."""
    brain = make(Evaluating, shard_evaluation=True, **options)
    brain.fit([1], points(8), points(samples), valid_loader_kwargs={"batch_size": 2})
    report = run_of(brain).preflight.report
    rows = {} if report is None else report.said
    return rows.get("valid set"), rows.get("gradients"), brain.evaluated


class Evaluating(Regression):
    evaluated = 0

    def evaluate_batch(self, batch, stage):
        self.evaluated += len(batch[0])
        return super().evaluate_batch(batch, stage)


@pytest.mark.parametrize(
    ("samples", "options", "words"),
    [
        (7, {"ddp_comm_hook": "fp16"}, "7 samples, 3 to 4 per process in 2 batches of 2"),
        pytest.param(8, {}, "8 samples, 4 per process in 2 batches of 2", marks=pytest.mark.slow),
        pytest.param(1, {}, "1 sample, 0 to 1 per process in 1 batch of 2", marks=pytest.mark.slow),
        pytest.param(
            7,
            {"virtual_ranks": 4},
            "7 samples, 3 to 4 per process in 2 batches of 2",
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_the_rows_that_each_process_evaluates_and_how_gradients_travel_are_said(
    ranks,
    samples,
    options,
    words,
):
    (said, gradients, most), (_, _, least) = ranks.run(rows_of_ranks, samples, options)
    assert said == words
    assert {str(least), str(most)} <= set(words.replace(",", "").split())
    hook = "sent between processes as fp16 (--ddp_comm_hook)"
    assert gradients == (hook if "ddp_comm_hook" in options else None)
