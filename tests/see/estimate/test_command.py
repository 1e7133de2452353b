"""``python -m ddpkit estimate`` with a real recipe; and what it leaves behind: nothing."""

from __future__ import annotations

import json
import textwrap

import pytest

from tests.launching import Run, python

RECIPE = """
    import torch
    from torch import nn
    import ddpkit
    from ddpkit.checkpoints import Checkpointer
    from ddpkit.strategies import Strategy, register
    from ddpkit.train_logger import FileTrainLogger

    class Quiet(Strategy):
        pass

    class Line(ddpkit.Brain):
        def compute_forward(self, batch, stage):
            assert stage is ddpkit.Stage.TRAIN, "a rehearsal evaluates nothing"
            return self.modules.net(batch[0])

        def compute_objectives(self, predictions, batch, stage):
            return nn.functional.mse_loss(predictions, batch[1])

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            self.hparams.train_logger.log_stats({"step": self.step}, {"loss": float(loss)})

        def on_stage_end(self, stage, stage_loss, epoch=None):
            raise AssertionError("a rehearsal ends no stage")

    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            assert index < 16, "more than the first samples were read"
            return torch.ones(32), torch.ones(1)

    register("quiet", Quiet)
    param_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(param_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], param_file, overrides)
    net = nn.Sequential(nn.Linear(32, hparams["width"]), nn.ReLU(), nn.Linear(hparams["width"], 1))
    hparams["train_logger"] = FileTrainLogger("logs/train_log.txt")
    checkpointer = Checkpointer("checkpoints/save", {"net": net})
    brain = Line({"net": net}, torch.optim.Adam, hparams, run_opts, checkpointer)
    brain.fit(range(1, 3), Rows(), Rows(), train_loader_kwargs={"batch_size": 16})
    print("after fit")
"""
WEIGHTS = 4 * (32 * 256 + 256 + 256 + 1)


@pytest.fixture
def recipe(tmp_path):
    """Run a command on the recipe, in a folder with nothing else in it."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    (tmp_path / "tmp").mkdir()
    (folder / "train.py").write_text(textwrap.dedent(RECIPE))
    (folder / "hparams.yaml").write_text("output_folder: results\nwidth: 256\n")

    def start(*words):
        run = Run(python(*words), folder, {"TMPDIR": str(tmp_path / "tmp")}, name="../run")
        run.folder = folder
        return run.wait(240)

    start.folder = folder
    return start


def left(run):
    """What is in the recipe's folder and in that of temporary files."""
    found = {str(path.relative_to(run.folder)) for path in run.folder.rglob("*") if path.is_file()}
    found = {name for name in found if "__pycache__" not in name}
    temporary = {path.name for path in (run.folder.parent / "tmp").glob("ddpkit-*")}
    return found - {"train.py", "hparams.yaml"} | temporary


@pytest.mark.costly
def test_a_recipe_is_estimated_on_its_first_batch_and_nothing_of_it_stays(recipe):
    command = ("-m", "ddpkit", "estimate", "train.py", "hparams.yaml")
    run = recipe(*command, "--nproc=2,1", "--memory=1GB", "--json=e.json", "--device=cpu")
    assert run.code == 0, run.err
    assert "Rehearsed on the CPU with 16 samples." in run.out
    assert "Fits under ddp on 2 processes: " in run.out
    assert "Not known, as the strategy does not say: data_parallel, quiet." in run.out
    assert "A checkpoint takes about 104.5 kB, and " in run.out
    assert " are free in results." in run.out
    found = json.loads((run.folder / "e.json").read_text())
    rows = {(row["strategy"], row["processes"]): row for row in found["rows"]}
    ddp = rows["ddp", 2]
    assert ddp["weights"] == ddp["gradients"] == WEIGHTS
    assert ddp["optimizer"] == pytest.approx(2 * WEIGHTS, rel=0.01)  # and the counts of steps
    # rows are divided, and the last layer has one
    assert rows["fsdp", 2]["weights"] == 4 * ((32 * 256 + 256) / 2 + 256 + 1)
    assert rows["single", 1]["is_chosen"]
    assert ddp["is_chosen"]
    assert not rows["zero1", 2]["is_chosen"]
    assert ddp["largest_micro_batch"] > 1000
    assert left(run) == {"e.json"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["--nproc=3", "--virtual_ranks=4"],
            "Cannot run under virtual_ranks on 3 processes: 4 virtual ranks cannot be divided",
        ),
        (
            ["--nproc=2", "--virtual_ranks=4", "--sync_batchnorm=True"],
            "Cannot run under virtual_ranks on 2 processes: virtual_ranks=4 does not work with ",
        ),
        (
            ["--nproc=2", "--data_parallel_backend"],
            "Cannot run under data_parallel on 2 processes: it is for one process.",
        ),
    ],
)
def test_what_cannot_run_is_an_error_also_without_a_known_memory(recipe, words, why):
    command = ("-m", "ddpkit", "estimate", "train.py", "hparams.yaml", "--device=cpu")
    run = recipe(*command, "--json=e.json", *words)
    assert run.code == 1, run.out + run.err
    assert why in run.out
    assert "Fits" not in run.out
    found = json.loads((run.folder / "e.json").read_text())
    assert found["refusal"] in run.out
    chosen = [row["strategy"] for row in found["rows"] + found["impossible"] if row["is_chosen"]]
    assert chosen


@pytest.mark.costly
def test_the_option_of_a_recipe_says_the_same(recipe):
    words = ("--device=cpu", "--estimate=2,100kB", "--strategy=zero1")
    run = recipe("train.py", "hparams.yaml", *words)
    assert run.code == 1, run.err
    assert "Does not fit under zero1 on 2 processes" in run.out
    assert "after fit" not in run.out
    assert left(run) == set()


@pytest.mark.costly
def test_rows_of_an_embedding_that_are_sparse_gradients_stay_so(recipe):
    changed = textwrap.dedent(RECIPE).replace("torch.optim.Adam", "torch.optim.SparseAdam")
    begin = changed.index("net = nn.Sequential")
    end = changed.index("hparams[", changed.index("\n", begin))
    words = """
class Words(nn.EmbeddingBag):
    def forward(self, numbers):
        return super().forward(numbers.long())

net = Words(4096, 1, sparse=True)
"""
    recipe.folder.joinpath("train.py").write_text(changed[:begin] + words + changed[end:])
    command = ("-m", "ddpkit", "estimate", "train.py", "hparams.yaml")
    run = recipe(*command, "--nproc=1", "--memory=1GB", "--json=e.json", "--device=cpu")
    assert run.code == 0, run.err
    found = json.loads((run.folder / "e.json").read_text())
    (single,) = [row for row in found["rows"] if row["strategy"] == "single"]
    # of each number that was looked up: a value of 4 bytes, and its place, of 8
    assert single["gradients"] == 16 * 32 * (4 + 8)
    assert single["weights"] == 4 * 4096
