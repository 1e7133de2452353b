"""Parts and strategies can go: what is left trains without them, and each has tests of its own."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from types import SimpleNamespace

import pytest

from tests import house
from tests.deletion.copies import Copy
from tests.deletion.features import (
    ROOT,
    TABLE,
    Feature,
    features,
    goes_with,
    made_unimportable,
    unknown_tests,
)
from tests.deletion.own_tests import owners_of
from tests.warm_starts import WarmProcess

TRAINS = """
    import sys
    from importlib.abc import MetaPathFinder

    GONE = set({gone!r})
    for name in [name for name in sys.modules if name.partition(".")[0] == "ddpkit"]:
        del sys.modules[name]  # this process has been started from one that had them

    class Blocks(MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name in GONE:
                raise ImportError(f"the core imports {{name}}")

    sys.meta_path.insert(0, Blocks())

    import torch
    from ddpkit import Brain
    from ddpkit.checkpoints import Checkpointer
    from ddpkit.epoch_loop import EpochCounter

    class Line(Brain):
        def compute_forward(self, batch, stage):
            return self.modules.line(batch)

        def compute_objectives(self, predictions, batch, stage):
            self.log("size", predictions.abs().mean())
            return (predictions - 2 * batch).square().mean()

        def on_stage_end(self, stage, stage_loss, epoch=None):
            self.losses.append(stage_loss)
            self.checkpointer.save_checkpoint()

    def train(epochs):
        counter = EpochCounter(epochs)
        keeper = Checkpointer({folder!r}, {{"counter": counter}})
        brain = Line(
            {{"line": torch.nn.Linear(1, 1)}},
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            run_opts={{"device": "cpu", "ema_decay": 0.9, "grad_accumulation_factor": 2}},
            checkpointer=keeper,
        )
        brain.losses = []
        data = [torch.full((1,), 0.1 * number) for number in range(8)]
        loading = {{"batch_size": 2}}
        brain.fit(counter, data, data, train_loader_kwargs=loading, valid_loader_kwargs=loading)
        return brain

    train(1)
    brain = train(3)
    assert len(brain.losses) == 4, brain.losses
    assert brain.losses[2] < brain.losses[0], brain.losses
    brain.evaluate(torch.ones(3, 1))
    assert not GONE & set(sys.modules)
"""


def test_a_model_trains_and_goes_on_where_no_part_and_no_strategy_can_be_imported(tmp_path):
    gone = sorted(feature.module for feature in features())
    script = textwrap.dedent(TRAINS.format(gone=gone, folder=str(tmp_path / "save")))
    with (tmp_path / "told").open("w+") as told:
        code = WarmProcess([sys.executable, "-c", script], stdout=told, stderr=told).wait(60)
        told.seek(0)
        assert code == 0, told.read()


def test_nothing_goes_on_without_a_file_of_the_package_that_it_cannot_import():
    """Else a test that passes without several files could fail without one of them."""
    words = ("ImportError", "ModuleNotFoundError")
    hidden = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in house.FILES
        if any(word in house.source_of(path) for word in words)
        for node in house.nodes_of(path)
        if isinstance(node, ast.Try)
        for handler in node.handlers
        if any(word in ast.unparse(handler) for word in words)
        if "raise" not in ast.unparse(handler)
        if re.search(r"(import|from) ddpkit", "\n".join(map(ast.unparse, node.body)))
    ]
    assert hidden == []


def test_files_are_taken_away_and_put_back(tmp_path):
    one = Feature("one.py", "one")
    other = Feature("other.py", "other")
    for feature in (one, other):
        (tmp_path / feature.path).write_text("import os\n")
    copy = Copy(tmp_path)
    copy.take_away([one])
    copy.take_away([other])
    assert (tmp_path / one.path).read_text() == "import os\n"
    assert (tmp_path / other.path).read_text() == "raise ImportError(__name__)\nimport os\n"


def test_a_test_of_a_feature_is_of_those_too_that_it_is_made_of():
    item = SimpleNamespace(dtest=SimpleNamespace(docstring="strategy='zero1'"), nodeid="ddpkit.x")
    made_of = ("ddpkit/strategies/ddp.py", "ddpkit/strategies/zero1.py")
    assert owners_of(item, "ddpkit/x.py") == made_of


def test_the_table_names_files_that_are_there():
    assert [feature.path for feature in TABLE if not (ROOT / feature.path).is_file()] == []
    assert unknown_tests(features()) == []


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import os\n", 1),
        ('"""A text\nof two lines."""\n\nfrom __future__ import annotations\nimport os\n', 5),
        ('"""A text."""\n', 2),
    ],
    ids=["nothing before", "text and future", "text alone"],
)
def test_a_file_that_was_made_unimportable_raises_first_and_has_all_its_lines(source, line):
    changed = made_unimportable(source)
    lines = changed.splitlines()
    assert lines.pop(line - 1) == "raise ImportError(__name__)"
    assert lines == source.splitlines()
    with pytest.raises(ImportError, match="gone"):
        exec(compile(changed, "changed", "exec"), {"__name__": "gone"})


def test_an_example_is_a_features_own_by_its_text():
    feature = Feature("ddpkit/strategies/zero1.py", "zero1")

    def example(text):
        return SimpleNamespace(nodeid="ddpkit.x", dtest=SimpleNamespace(docstring=text))

    assert feature.owns_test(example("strategy='zero1'"))
    assert not feature.owns_test(example("strategy='ddp'"))


FILE_OF_TESTS = """
SIZES = {"strategy": "zero1"}

def sizes():
    return SIZES

def test_by_what_it_uses():
    assert sizes()

@pytest.mark.parametrize("strategy", ["zero1", "ddp", sizes])
def test_by_parameters(strategy):
    assert strategy

class TestOthers:
    def test_of_a_class(self):
        assert "zero1"
"""


@pytest.mark.parametrize(
    ("name", "params", "fixtures", "is_own"),
    [
        ("test_by_what_it_uses", {}, (), True),
        ("test_by_parameters", {"strategy": "zero1"}, (), True),
        ("test_by_parameters", {"strategy": "ddp"}, (), False),
        ("test_by_parameters", {"strategy": SimpleNamespace(__name__="sizes")}, (), True),
        ("test_by_parameters", {"strategy": "ddp"}, ("ranks",), True),
        ("test_of_a_class", {}, (), True),
    ],
)
def test_a_test_is_a_features_own_by_text_parameters_or_fixture(
    tmp_path, name, params, fixtures, is_own
):
    feature = Feature("ddpkit/strategies/zero1.py", "zero1", fixtures=("ranks",))
    path = tmp_path / "test_something.py"
    path.write_text(FILE_OF_TESTS)
    item = SimpleNamespace(
        nodeid=f"{path.name}::{name}",
        path=path,
        originalname=name,
        fixturenames=fixtures,
        callspec=SimpleNamespace(params=params),
    )
    assert feature.owns_test(item) is is_own


@pytest.mark.costly
def test_files_of_tests_import_only_features_that_all_their_tests_are_of():
    """Else the file cannot be collected in the delete test, and no test of it runs."""
    every = features()
    with_users = {feature.module: goes_with(feature, every) for feature in every}
    wrong = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        wrong += [
            f"{name}: {module}"
            for module in imported_at_the_top(path) & set(with_users)
            if not any(one.owns_file(name) for one in with_users[module])
        ]
    assert wrong == []


def imported_at_the_top(path):
    found = set()
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom):
            found.add(statement.module)
            found |= {f"{statement.module}.{alias.name}" for alias in statement.names}
        elif isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
    return found
