"""Which strategy an option chooses: by a name, by a path, by an object; and what is no strategy."""

from __future__ import annotations

import functools

import pytest

from ddpkit import strategies
from ddpkit.checkpoints import Checkpointer
from ddpkit.command_line import help_text
from ddpkit.errors import ConfigError
from ddpkit.hparams import load_hparams
from ddpkit.run_opts import RunOptions, parse_arguments
from ddpkit.strategies.base import Strategy
from ddpkit.strategies.choice import check_strategy, choose_strategy
from ddpkit.strategies.loading import new_strategy
from ddpkit.strategies.names import registered
from ddpkit.strategies.single import SingleDevice
from tests.recipes import Regression, linear, make, sgd


class Own(Strategy):
    """Works in one process, too."""

    def __init__(self, every=8):
        self.every = every

    def runs_alone(self):
        return True


class Lacking(Strategy):
    def __init__(self, every):
        self.every = every


PATH = f"{__name__}:Own"


@pytest.mark.parametrize("name", sorted(registered()))
def test_each_strategy_of_the_library_is_made_of_its_name(name):
    made = new_strategy(name)
    assert isinstance(made, Strategy)
    assert type(made).__module__ == registered()[name].where.partition(":")[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            "fdsp",
            r"one of auto, data_parallel, ddp, fsdp, .* or module:Class \(did you mean 'fsdp'",
        ),
        ("DDP", "one of auto, "),
        ("my_package.averaging.Every", r"\(did you mean 'my_package.averaging:Every'\?\)"),
        (3, "a name, or an object of a subclass of ddpkit.strategies.Strategy, got 3"),
        (None, "expects a name, or an object"),
    ],
)
def test_what_can_be_no_strategy_is_refused_when_it_is_given(given, words):
    with pytest.raises(ConfigError, match=words):
        RunOptions(strategy=given)


def test_the_command_line_names_the_strategies_and_the_near_miss(tmp_path):
    file = tmp_path / "hparams.yaml"
    file.write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"^--strategy expects one of .*mean 'zero1'"):
        parse_arguments([str(file), "--strategy=zero"])
    assert parse_arguments([str(file), f"--strategy={PATH}"])[1].strategy == PATH
    assert "--strategy auto|ddp|fsdp|zero1|single" in help_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("no_such.averaging:Every", "there is no module 'no_such' to import. Install it"),
        (f"{__name__}:Owm", f"has no 'Owm'. Did you mean '{__name__}.Own'?"),
        ("tests.strategies.test_chosing:Own", "mean 'tests.strategies.test_choosing'"),
        ("collections:OrderedDict", "is no strategy. Give a subclass of ddpkit.strategies"),
        (Lacking, "cannot be made without arguments: missing a required argument: 'every'"),
    ],
)
def test_what_is_no_strategy_is_told_before_the_run(given, words):
    options = RunOptions(device="cpu", strategy=given)
    with pytest.raises(ConfigError) as caught:
        choose_strategy(options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "every"),
    [
        (PATH, 8),
        (Own, 8),
        (functools.partial(Own, every=3), 3),
        (Own(5), 5),
    ],
    ids=["path", "class", "class with arguments", "object"],
)
def test_a_strategy_from_outside_is_chosen(given, every):
    options = RunOptions(device="cpu", strategy=given)
    chosen = choose_strategy(options)
    assert (type(chosen), chosen.every, chosen.name) == (Own, every, "Own")
    assert (chosen.options, chosen.device, chosen.has_own_fit_batch) == (options, "cpu", False)


def test_the_yaml_gives_an_object_and_the_command_line_wins(tmp_path):
    file = tmp_path / "hparams.yaml"
    file.write_text(f"every: 2\nstrategy: !new:{__name__}.Own\n  every: !ref <every>\n")
    _, run_opts, overrides = parse_arguments([str(file), "--every=4", "--device=cpu"])
    brain = Regression({"net": linear()}, sgd(), load_hparams(str(file), overrides), run_opts)
    assert repr(brain.run_opts.strategy) == PATH  # the same on each rank, and in the run's log
    assert brain.run_opts.strategy.every == 4
    assert brain.run_opts.changed()["strategy"] == PATH
    run_opts = parse_arguments([str(file), "--strategy=single", "--device=cpu"])[1]
    assert run_opts.resolved(load_hparams(str(file))).strategy == "single"


def test_an_object_is_the_strategy_of_one_brain():
    own = Own()
    make(strategy=own)
    with pytest.raises(ConfigError, match="is the strategy of another Brain already"):
        make(strategy=own)


@pytest.fixture
def named():
    strategies.register("every", PATH)
    yield "every"
    strategies.unregister("every")


def test_a_strategy_is_given_a_name(named):
    assert type(choose_strategy(RunOptions(device="cpu", strategy=named))) is Own
    assert "every" in strategies.registered_names()
    strategies.register("every", PATH)  # a module may be imported twice
    with pytest.raises(ConfigError, match="the name stands for .* already"):
        strategies.register("every", Own)
    with pytest.raises(ConfigError, match=r"one of auto, .* every, .*\(did you mean 'every'\?\)"):
        RunOptions(strategy="evry")


@pytest.mark.parametrize(
    ("name", "where", "words"),
    [
        ("zero1", PATH, "a strategy of ddpkit has this name"),
        ("auto", PATH, "is not 'auto'"),
        ("two words", PATH, "has letters, digits and underscores"),
        ("mine", "my_package.Every", "write the module, a colon and the class"),
        ("mine", int, "this is no subclass of ddpkit.strategies.Strategy"),
    ],
)
def test_what_cannot_be_registered(name, where, words):
    with pytest.raises(ConfigError, match=words):
        strategies.register(name, where)
    assert "mine" not in strategies.registered_names()


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("virtual_ranks", "--virtual_ranks"),
        ("data_parallel", "--data_parallel_backend"),
        ("local_sgd", "--ddp_comm_hook=post_local_sgd"),
    ],
)
def test_a_strategy_with_an_option_of_its_own_needs_it(name, option):
    with pytest.raises(ConfigError, match=f"strategy={name!r} needs {option}, which .* Give"):
        check_strategy(RunOptions(device="cpu", strategy=name))


def test_the_name_of_a_strategy_goes_with_its_option():
    options = RunOptions(device="cpu", strategy="virtual_ranks", virtual_ranks=4)
    assert choose_strategy(options).division().each == 4


ALONE = {
    "virtual_ranks": (
        "for the same bits on any number of processes gradients are added up in one order, and "
        "another strategy adds them up in its own. It works with --strategy=single or zero1 or fsdp"
    ),
    "data_parallel_backend": "it is a strategy itself, which divides each batch over the GPUs of",
}


@pytest.mark.parametrize("given", [{"virtual_ranks": 4}, {"data_parallel_backend": True}])
def test_a_strategy_from_outside_does_not_go_with_one_that_an_option_chooses(given):
    (name,) = given
    words = f"{name}={given[name]} does not work with strategy={PATH}: {ALONE[name]}"
    with pytest.raises(ConfigError, match=words):
        check_strategy(RunOptions(device="cpu", strategy=PATH, **given))


def test_no_refusal_of_a_strategy_beside_an_option_is_without_its_reason():
    chosen = {name for name, known in registered().items() if known.chosen_by}
    assert chosen == {name for name, known in registered().items() if known.alone}


def test_a_strategy_that_does_nothing_alone_is_one_device_in_one_process():
    kind = type("Alone", (Own,), {"runs_alone": Strategy.runs_alone})
    assert type(choose_strategy(RunOptions(device="cpu", strategy=kind))) is SingleDevice
    with pytest.raises(ConfigError, match="does not work with static_graph=True: it is DDP's"):
        choose_strategy(RunOptions(device="cpu", strategy=kind, static_graph=True))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ddp_comm_hook": "bf16", "check_parity": 2}, "it would compare gradients that were"),
        ({"ddp_comm_hook": "powersgd", "precision": "fp16"}, "would have its scale"),
        ({"static_graph": True, "find_unused_parameters": True}, "uses the same parameters"),
    ],
)
def test_what_does_not_go_with_an_option_of_ddp_is_told_on_one_process_too(given, words):
    with pytest.raises(ConfigError, match=words):
        check_strategy(RunOptions(device="cpu", **given))


SGD = {"ddp_comm_hook": "post_local_sgd"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strategy": "fsdp", "static_graph": True}, "static_graph=True: it is DDP's"),
        ({"strategy": "fsdp", "broadcast_buffers": False}, "broadcast_buffers=False: it is DDP's"),
        (
            {"strategy": "fsdp", "sync_batchnorm": False},
            "only DDP sends buffers",
        ),
        (
            {"strategy": "fsdp", "fsdp_param_dtype": "bf16", "check_parity": 2},
            "strategy=fsdp fsdp_param_dtype=bf16 does not work with check_parity=2",
        ),
        ({"virtual_ranks": 2, "sync_batchnorm": True}, "has batch statistics of its own"),
        ({"virtual_ranks": 2, "bucket_cap_mb": 1.0}, "bucket_cap_mb=1.0: it is DDP's"),
        (SGD, "ddp_comm_hook=post_local_sgd needs --local_sgd_period: it needs the optimizer"),
        ({**SGD, "local_sgd_period": 2, "strategy": "zero1"}, "the whole state of the optimizers"),
        ({**SGD, "local_sgd_period": 2, "virtual_ranks": 2}, "depends on the number of processes"),
        ({"evaluate_ema": True}, "evaluate_ema=True needs --ema_decay"),
        (
            {"evaluate_ema": True, "ema_decay": 0.9, "sync_batchnorm": False},
            "sync_batchnorm=False does not work with evaluate_ema=True",
        ),
    ],
)
def test_what_does_not_go_together_is_told_on_one_process_too(given, words):
    with pytest.raises(ConfigError) as caught:
        check_strategy(RunOptions(device="cpu", **given))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({**SGD, "local_sgd_period": 2}, "past optimizers_step()"),
        ({"strategy": "fsdp", "fsdp_whole_gradients": True}, "only in the last batch of a step"),
    ],
)
def test_what_does_not_go_with_a_fit_batch_of_the_recipe(given, words):
    options = RunOptions(device="cpu", **given)
    check_strategy(options)
    with pytest.raises(ConfigError) as caught:
        check_strategy(options, has_own_fit_batch=True)
    assert str(caught.value).startswith("a fit_batch of the recipe does not work with ")
    assert words in str(caught.value)


def test_a_module_that_fails_where_it_is_imported_is_told_with_its_line(tmp_path, monkeypatch):
    (tmp_path / "fails_to_import.py").write_text("parts = 0\nper_part = 1 / parts\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = (
        r"strategy='fails_to_import:Own': the module 'fails_to_import' cannot be imported: "
        r"ZeroDivisionError: division by zero \(at fails_to_import.py:2"
    )
    with pytest.raises(ConfigError, match=words):
        new_strategy("fails_to_import:Own")


def test_what_does_not_go_with_a_hook_of_ddp_does_not_go_with_local_sgd():
    """It is a hook of DDP, whose refusals hold for it, too."""
    local = {"ddp_comm_hook": "post_local_sgd", "local_sgd_period": 2}
    options = RunOptions(**local, auto_micro_batch=True, global_batch_size=4)
    with pytest.raises(ConfigError, match="does not work with auto_micro_batch"):
        new_strategy("local_sgd").check(options, has_own_fit_batch=False)


class Gathers(Strategy):
    def whole_states(self, objects):
        return {}


class Divides(Strategy):
    shards = 2


class DividesAsObject(Strategy):
    def __init__(self):
        super().__init__()
        self.virtual_ranks = 4


class KnowsBothNames(Gathers):
    divided_states = Gathers.whole_states


@pytest.mark.parametrize(
    ("kind", "former", "name"),
    [
        (Gathers, "whole_states", "divided_states"),
        (Divides, "shards", "division"),
        (DividesAsObject, "virtual_ranks", "division"),
    ],
)
def test_an_answer_under_a_former_name_is_refused_with_the_new_one(kind, former, name):
    refuses_former_name(kind, former, name)


def test_a_former_name_is_refused_in_a_subclass_of_fsdp():
    from ddpkit.strategies.fsdp import FSDP  # here: the other tests pass without it

    class GathersWithFsdp(FSDP):
        def whole_states(self, objects):
            return {}

    refuses_former_name(GathersWithFsdp, "whole_states", "divided_states")


def refuses_former_name(kind, former, name):
    for given in (kind, kind()):
        with pytest.raises(ConfigError) as caught:
            new_strategy(given)
        assert f"{kind.__name__}.{former} is not read any more" in str(caught.value)
        assert f"Override {name}() instead" in str(caught.value)


@pytest.mark.parametrize("given", [KnowsBothNames, "virtual_ranks", "fsdp", "zero1", "ddp"])
def test_a_strategy_that_has_the_new_name_may_have_the_former_one(given):
    assert isinstance(new_strategy(given), Strategy)


def test_a_checkpointer_refuses_the_former_name_of_divided_states(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(ConfigError, match="Assign the function to divided_states"):
        checkpointer.whole_states = dict
