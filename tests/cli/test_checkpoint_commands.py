"""``python -m ddpkit ckpt``: what it prints, how it ends, and that looking changes nothing."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from ddpkit.checkpointing import storage
from ddpkit.checkpoints import Checkpointer
from ddpkit.cli import main
from ddpkit.cli.checkpoint_commands import printable, size_text, value_text
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError
from tests.launching import Run, python, soon
from tests.warm_starts import WarmProcess

PROGRAM = [sys.executable, "-m", "ddpkit", "ckpt"]


class Loop:
    """Saves what a Brain says of its loop."""

    def __init__(self):
        self.state = {"step": 0, "epoch": 0, "optimizer_step": 0, "avg_train_loss": 0.5}


def save_loop(loop, path):
    path.write_text(yaml.safe_dump(loop.state))


class Folder:
    """A folder of checkpoints as a run leaves it, and what makes them."""

    def __init__(self, path):
        self.path = path
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.25)
        self.net(torch.randn(2, 4)).sum().backward()
        self.optimizer.step()
        self.counter = EpochCounter(9)
        self.loop = Loop()
        recoverables = {"model": self.net, "optimizer": self.optimizer, "counter": self.counter}
        self.checkpointer = Checkpointer(path, recoverables)
        hooks = {"custom_save_hook": save_loop, "custom_load_hook": lambda *where: None}
        self.checkpointer.add_recoverable("brain", self.loop, **hooks)

    def save(self, name, time, **meta):
        end_of_epoch = meta.pop("end_of_epoch", True)
        meta = {"unixtime": float(time), **meta}
        return self.checkpointer.save_checkpoint(meta, end_of_epoch, name).path

    def epoch(self, name, **meta):
        number = next(self.counter)
        self.loop.state["epoch"] = number
        self.loop.state["optimizer_step"] += 10
        with torch.no_grad():
            self.net[0].weight.fill_(number)
        return self.save(name, 1000 * number, **meta)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "save")


@pytest.fixture
def three(folder):
    """Epochs 1 and 2, and a checkpoint in the middle of epoch 3."""
    folder.epoch("one", loss=0.75, WER=30.5)
    folder.epoch("two", loss=0.5, WER=20.25)
    next(folder.counter)
    folder.loop.state.update(step=7, epoch=3, optimizer_step=27)
    folder.save("middle", 3000, end_of_epoch=False, brain_intra_epoch_ckpt=True)
    return folder


@pytest.fixture
def ckpt(capsys, monkeypatch):
    """Run a command; return its status, and the lines of both outputs."""

    def run(*words, columns=None):
        if columns is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", str(columns))
        capsys.readouterr()
        try:
            status = main(["ckpt", *map(str, words)])
        except SystemExit as exit_:
            status = exit_.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return status, out.splitlines(), err.splitlines()

    return run


def cells(line):
    return [cell for cell in line.split("  ") if cell]


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def picture(folder):
    """What a folder holds, to the nanosecond."""
    paths = sorted([folder, *folder.rglob("*")])
    return {
        path: (
            path.lstat().st_mtime_ns,
            path.lstat().st_ctime_ns,
            path.lstat().st_size,
            path.lstat().st_mode,
        )
        for path in paths
    }


# ----------------------------------------------------------------------------------------------- ls


def test_ls_lists_the_newest_first_with_what_is_known_of_each(ckpt, three):
    status, out, err = ckpt("ls", three.path)
    assert (status, err) == (0, [])
    assert out[0].split() == ["name", "saved", "epoch", "step", "size", "ranks", "files"]
    local = [time.strftime("%Y-%m-%d %H:%M", time.localtime(1000 * number)) for number in (3, 2, 1)]
    rows = [[cell.strip() for cell in cells(line)] for line in out[1:4]]
    assert [row[:4] for row in rows] == [
        ["CKPT+middle", local[0], "in 3, batch 7", "27"],
        ["CKPT+two", local[1], "end of 2", "20"],
        ["CKPT+one", local[2], "end of 1", "10"],
    ]
    assert [row[5:] for row in rows] == [
        ["1", "ok"],
        ["1", "ok", "loss=0.5", "WER=20.25"],
        ["1", "ok", "loss=0.75", "WER=30.5"],
    ]
    sizes = [sum(path.stat().st_size for path in (three.path / row[0]).iterdir()) for row in rows]
    assert [row[4] for row in rows] == [size_text(size) for size in sizes]
    assert out[5] == f"3 checkpoint(s) in {three.path}, {size_text(sum(sizes))}, 0 damaged."
    assert out[6] == f"Sizes were compared; ckpt verify {three.path} reads every byte."


def test_ls_leaves_out_columns_of_which_nothing_is_known(ckpt, tmp_path):
    Checkpointer(tmp_path, {"model": nn.Linear(1, 1)}).save_checkpoint()
    _, out, _ = ckpt("ls", tmp_path)
    assert out[0].split() == ["name", "saved", "epoch", "size", "ranks", "files"]


def test_ls_takes_the_epoch_from_the_meta_or_from_the_brain(ckpt, folder):
    folder.epoch("by-the-brain")
    folder.epoch("by-the-meta", epoch=7)
    (folder.path / "CKPT+none").mkdir()
    (folder.path / "CKPT+none" / "CKPT.yaml").write_text("unixtime: 1\n")
    _, out, _ = ckpt("ls", folder.path)
    assert [cells(line)[2].strip() for line in out[1:4]] == ["end of 7", "end of 1", "end of ?"]


def test_ls_lists_damaged_ones_with_the_reason(ckpt, three):
    path = three.path / "CKPT+one" / "model.ckpt"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-3])
    (three.path / "CKPT+two" / "CKPT.yaml").write_text("")
    (three.path / "CKPT+half-deleted").mkdir()
    status, out, _ = ckpt("ls", three.path)
    assert status == 0
    text = "\n".join(out)
    assert f"    damaged: model.ckpt has {size - 3} bytes instead of {size}" in out
    assert "damaged: CKPT.yaml is empty or does not say when" in text
    assert "    damaged: CKPT.yaml cannot be read: [Errno 2] No such file" in text
    assert "4 checkpoint(s)" in text
    assert "3 damaged" in text
    below = out.index(next(line for line in out if line.startswith("CKPT+one")))
    assert "damaged: model.ckpt" in out[below + 1]


def test_ls_of_one_checkpoint_lists_that(ckpt, three):
    status, out, _ = ckpt("ls", three.path / "CKPT+two")
    assert status == 0
    assert [line.split()[0] for line in out[1 : out.index("")]] == ["CKPT+two"]


def test_ls_without_a_folder_takes_the_current_one(ckpt, three, monkeypatch):
    monkeypatch.chdir(three.path)
    assert ckpt("ls")[0] == 0


@pytest.mark.parametrize("command", ["show", "verify"])
def test_a_checkpoint_may_be_the_current_folder_or_have_another_name(
    ckpt,
    three,
    monkeypatch,
    command,
):
    (three.path / "CKPT+two").rename(three.path / "best")
    assert ckpt(command, three.path / "best")[0] == 0
    monkeypatch.chdir(three.path / "best")
    assert ckpt(command, ".")[0] == 0


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_folder_without_checkpoints_says_so(ckpt, three, tmp_path, command):
    status, out, err = ckpt(command, tmp_path)
    assert (status, out) == (1, [])
    assert err == [f"python -m ddpkit: error: there is no checkpoint in '{tmp_path}'."]
    status, out, err = ckpt(command, tmp_path / "nowhere")
    assert (status, out) == (1, [])
    assert err == [
        (
            f"python -m ddpkit: error: '{tmp_path}/nowhere' cannot be read as a folder: No such "
            "file or directory."
        )
    ]
    (tmp_path / "file").write_text("")
    status, out, err = ckpt(command, tmp_path / "file")
    assert (status, out) == (1, [])
    assert err == [
        (f"python -m ddpkit: error: '{tmp_path}/file' cannot be read as a folder: Not a directory.")
    ]


# --------------------------------------------------------------------------------------------- show


def test_show_tells_what_is_in_each_file(ckpt, three):
    status, out, err = ckpt("show", three.path / "CKPT+two")
    assert (status, err) == (0, [])
    text = "\n".join(out)
    assert out[0] == "CKPT+two"
    assert f"  folder    {three.path}" in out
    assert any(line.startswith("  saved     ") and line.endswith(", end of 2") for line in out)
    assert f"torch {torch.__version__}, python" in text
    assert "world_size 1" in text
    assert "6 file(s)," in text
    assert "sizes are right" in text
    assert "  meta      loss: 0.5" in out
    assert "  meta      WER: 20.25" in out

    def below(name):
        start = next(number for number, line in enumerate(out) if line.startswith(f"{name}, "))
        return out[start + 1 :]

    assert below("model.ckpt")[0] == "  28 number(s) in 7 tensor(s): 6 float32, 1 int64"
    assert below("optimizer.ckpt")[0].startswith("  46 number(s) in 12 tensor(s)")
    assert below("optimizer.ckpt")[1].startswith(
        "  param_groups: [{'amsgrad': False, 'betas': (0.9, 0.999), 'capturable': False"
    )
    assert below("counter.ckpt")[0] == "  2"
    assert "  optimizer_step: 20" in below("brain.ckpt")[:4]
    assert "0.weight" not in text


def test_a_large_file_of_the_brain_is_read_for_step_and_batch(ckpt, three):
    """As with thousands of parameters that were frozen."""
    path = three.path / "CKPT+two"
    frozen = ", ".join(f"layer.{number}: true" for number in range(20_000))
    (path / "brain.ckpt").write_text(
        f"step: 3\nepoch: 2\noptimizer_step: 77\ndata: {{a: 1}}\ntrained: {{{frozen}}}\n"
    )
    meta = path / "CKPT.yaml"
    meta.write_text(meta.read_text().replace("end-of-epoch: true", "end-of-epoch: false"))
    _, out, _ = ckpt("show", path)
    assert any(line.endswith(", in 2, batch 3") for line in out), out[:4]
    assert "  optimizer_step: 77" in out
    assert max(map(len, out)) < 5000
    _, out, _ = ckpt("ls", three.path)
    assert "  77  " in next(line for line in out if line.startswith("CKPT+two"))


def test_show_lists_tensors_when_asked(ckpt, three):
    _, out, _ = ckpt("show", three.path / "CKPT+two", "--tensors")
    rows = [line.split("  ") for line in out]
    rows = [[cell.strip() for cell in row if cell] for row in rows]
    assert ["0.weight", "float32 3 x 4"] in rows
    assert ["1.num_batches_tracked", "int64 one number"] in rows
    assert ["state.0.exp_avg", "float32 3 x 4"] in rows


def test_show_of_a_folder_is_its_newest_that_is_whole(ckpt, three):
    path = three.path / "CKPT+middle" / "model.ckpt"
    assert ckpt("show", three.path)[1][0] == "CKPT+middle"
    path.unlink()
    assert ckpt("show", three.path)[1][0] == "CKPT+two"


def test_show_of_a_damaged_one_shows_what_can_be_read(ckpt, three):
    path = three.path / "CKPT+two" / "model.ckpt"
    path.write_bytes(path.read_bytes()[:100])
    status, out, _ = ckpt("show", three.path / "CKPT+two")
    assert status == 1
    text = "\n".join(out)
    assert "  damaged   model.ckpt has 100 bytes instead of" in text
    assert "cannot load" in text
    assert "46 number(s) in 12 tensor(s)" in text


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_folder_of_checkpoints_may_be_named_like_one(ckpt, three, command):
    folder = three.path.rename(three.path.with_name("CKPTS"))
    status, out, _ = ckpt(command, folder)
    assert status == 0
    assert any(line.startswith("CKPT+middle") for line in out)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("closed", ["folder", "checkpoint"])
def test_what_may_not_be_looked_into_is_not_called_empty(ckpt, three, tmp_path, closed):
    checkpoint = three.path / "CKPT+one"
    (three.path if closed == "folder" else checkpoint).chmod(0o700)
    for parent in [path for path in tmp_path.parents if "pytest" in path.name] + [tmp_path]:
        parent.chmod(0o755)
    for command in ("ls", "show", "verify"):
        os.seteuid(65534)
        try:
            _, out, err = ckpt(command, checkpoint)
        finally:
            os.seteuid(0)
        said = " ".join(out + err)
        assert "Permission denied" in said


def save_ranks(path, states):
    torch.save({"format": 1, "world_size": len(states), "ranks": states}, path)


@pytest.mark.parametrize(
    "states",
    [[], [None], [3], [{}], [{"random": {}}], [[torch.ones(1)]], ["x\x1b[2J"]],
)
def test_states_of_ranks_of_any_shape_are_shown(ckpt, tmp_path, states):
    path = tmp_path / "CKPT+a"
    path.mkdir()
    (path / "CKPT.yaml").write_text("unixtime: 1.0")
    save_ranks(path / "ranks.ckpt", states)
    status, out, _ = ckpt("show", path, "--tensors")
    assert status == 0
    assert "\x1b" not in "".join(out)


def test_show_of_long_text_and_of_bytes_is_short(ckpt, tmp_path):
    path = tmp_path / "CKPT+a"
    path.mkdir()
    (path / "CKPT.yaml").write_text("unixtime: 1\n")
    (path / "words.ckpt").write_text("\n".join(f"line {number}" for number in range(100)))
    (path / "bytes.ckpt").write_bytes(b"\x01\x02\xff" * 100)
    (path / "empty.ckpt").write_bytes(b"")
    (path / "ranks").mkdir()
    (path / "ranks" / "0.ckpt").write_text("of rank 0")
    status, out, _ = ckpt("show", path, "--lines", "3")
    assert status == 1  # for the empty file
    assert "  ... and 97 more lines" in out
    assert "  line 2" in out
    assert "  line 3" not in out
    assert "  neither text nor a file of torch.save: not looked into" in out
    assert out[out.index("ranks/0.ckpt, 9B") + 1] == "  of rank 0"


def test_show_needs_little_memory_for_large_tensors(tmp_path, monkeypatch):
    from ddpkit.cli import checkpoint_commands as commands

    torch.save({"large": torch.zeros(100_000), "small": torch.tensor([3.0])}, tmp_path / "a.ckpt")
    real = commands.safe_load
    places = []
    monkeypatch.setattr(
        commands,
        "safe_load",
        lambda path, place: places.append(place) or real(path, place),
    )
    assert commands.describe(tmp_path / "a.ckpt") == ["100,001 number(s) in 2 tensor(s): 2 float32"]
    assert places == ["meta"]


def test_show_of_sparse_tensors(tmp_path):
    from ddpkit.cli import checkpoint_commands as commands

    torch.save({"edges": torch.eye(3).to_sparse()}, tmp_path / "a.ckpt")
    found = commands.describe(tmp_path / "a.ckpt", tensors=True)
    assert found == ["9 number(s) in 1 tensor(s): 1 float32", "edges  float32 3 x 3"]


# ------------------------------------------------------------------------------------------- verify


def test_verify_reads_every_byte(ckpt, three):
    status, out, _ = ckpt("verify", three.path)
    assert status == 0
    assert [line.split(" (")[0] for line in out] == [
        "CKPT+middle: whole",
        "CKPT+two: whole",
        ("CKPT+one: whole"),
    ]
    flip_a_byte(three.path / "CKPT+two" / "optimizer.ckpt")
    status, out, err = ckpt("verify", three.path)
    assert (status, err) == (1, [])
    assert (
        "CKPT+two: damaged: optimizer.ckpt fails its checksum: its content has changed since it "
        "was saved"
    ) in out
    assert sum("whole" in line for line in out) == 2
    assert ckpt("verify", three.path / "CKPT+two")[0] == 1
    assert ckpt("verify", three.path / "CKPT+one", three.path / "CKPT+middle")[0] == 0


def test_verify_of_each_kind_of_damage(ckpt, three):
    (three.path / "CKPT+two" / "model.ckpt").unlink()
    (three.path / "CKPT+one" / "manifest.json").unlink()
    (three.path / "CKPT+middle" / "CKPT.yaml").unlink()
    status, out, _ = ckpt("verify", three.path)
    assert status == 1
    text = "\n".join(out)
    assert "CKPT+two: damaged: model.ckpt is missing" in text
    assert "CKPT+one: damaged: manifest.json is missing" in text
    assert "CKPT+middle: damaged: CKPT.yaml cannot be read" in text


def test_verify_without_a_manifest_says_how_far_it_can_tell(ckpt, three):
    path = three.path / "CKPT+two"
    (path / "manifest.json").unlink()
    (path / "CKPT.yaml").write_text("unixtime: 5\n")
    status, out, _ = ckpt("verify", path)
    assert status == 0
    assert out[0].startswith("CKPT+two: whole as far as can be told without a manifest (5 file(s)")
    content = (path / "model.ckpt").read_bytes()
    place = content.index(torch.full((4,), 2.0).numpy().tobytes())
    (path / "model.ckpt").write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    status, out, _ = ckpt("verify", path)
    assert status == 1
    assert out[0].startswith("CKPT+two: damaged: model.ckpt")


# ------------------------------------------------------------------------------------------ average


@pytest.mark.parametrize(
    ("words", "mean", "names"),
    [
        ((), 2.5, 4),
        (("--num", 2), 3.5, 2),
        (("--min-key", "loss", "--num", 2), 1.5, 2),
        (("--max-key", "loss", "--num", 1), 3.0, 1),
    ],
)
def test_average(ckpt, folder, tmp_path, words, mean, names):
    for name, loss in (("a", 0.1), ("b", 0.2), ("c", 0.9), ("d", float("nan"))):
        folder.epoch(name, loss=loss)
    output = tmp_path / "mean.pt"
    status, out, err = ckpt(
        "average",
        folder.path,
        "--recoverable",
        "model",
        "--output",
        output,
        *words,
    )
    assert (status, err) == (0, [])
    assert out[0].count("CKPT+") == names
    assert out[1] == f"wrote {output}: 7 tensor(s), {size_text(output.stat().st_size)}"
    state = torch.load(output, weights_only=True)
    assert type(state) is dict
    assert torch.equal(state["0.weight"], torch.full((3, 4), mean))
    assert state["1.num_batches_tracked"].item() == 1
    nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).load_state_dict(state)


def test_average_of_named_checkpoints(ckpt, three, tmp_path):
    paths = [three.path / "CKPT+one", three.path / "CKPT+two"]
    status, out, _ = ckpt(
        "average",
        *paths,
        "--recoverable",
        "model",
        "--output",
        tmp_path / "mean.pt",
    )
    assert status == 0
    assert out[0] == "from CKPT+two, CKPT+one"
    assert torch.load(tmp_path / "mean.pt", weights_only=True)["0.weight"][0, 0].item() == 1.5


def test_average_of_what_is_damaged_is_refused(ckpt, three, tmp_path):
    flip_a_byte(three.path / "CKPT+two" / "model.ckpt")
    words = ("--recoverable", "model", "--output", tmp_path / "mean.pt")
    status, out, err = ckpt("average", three.path, *words)
    assert (status, out) == (1, [])
    reason = "model.ckpt fails its checksum: its content has changed since it was saved"
    assert (
        f"{three.path}/CKPT+two is damaged: {reason}. Name the checkpoints that are to be used."
    ) in err[0]
    assert ckpt("average", three.path, "--num", "1", *words)[0] == 0, "the others are not looked at"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--recoverable", "modle"),
            (
                r"has no file for 'modle'; it has \['brain', 'counter', "
                r"'model', 'optimizer'\]\."
            ),
        ),
        (("--recoverable", "optimizer"), r"does not hold a module's state"),
        (("--recoverable", "counter"), r"cannot load .*counter\.ckpt"),
        (
            ("--recoverable", "model", "--max-key", "PER"),
            (
                r"has 'PER' in its meta; there are: "
                r".*WER, .*loss"
            ),
        ),
    ],
)
@pytest.mark.parametrize("command", ["average", "export"])
def test_what_cannot_be_written_is_said_and_nothing_is_left(
    ckpt,
    three,
    tmp_path,
    command,
    words,
    message,
):
    before = picture(tmp_path)
    status, out, err = ckpt(command, three.path, *words, "--output", tmp_path / "out.pt")
    assert (status, out) == (1, [])
    assert len(err) == 1
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(err[0])
    assert picture(tmp_path) == before


def test_average_of_different_models(ckpt, folder, tmp_path):
    folder.epoch("one")
    other = Checkpointer(folder.path, {"model": nn.Linear(2, 2)})
    other.save_checkpoint(name="other")
    status, _, err = ckpt(
        "average",
        folder.path,
        "--recoverable",
        "model",
        "--output",
        tmp_path / "mean.pt",
    )
    assert status == 1
    assert "the states differ in" in err[0]


# ------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_export(ckpt, three, tmp_path, form):
    output = tmp_path / f"model.{form}"
    status, out, err = ckpt(
        "export",
        three.path / "CKPT+one",
        "--recoverable",
        "model",
        "--output",
        output,
    )
    assert (status, err) == (0, [])
    assert out == [
        "from CKPT+one",
        (f"wrote {output}: 7 tensor(s), {size_text(output.stat().st_size)}"),
    ]
    if form == "pt":
        state = torch.load(output, weights_only=True)
    else:
        from safetensors.torch import load_file

        state = load_file(output)
    assert torch.equal(state["0.weight"], torch.ones(3, 4))
    assert state["1.num_batches_tracked"].dtype is torch.int64
    assert list(tmp_path.glob("*.unfinished*")) == []


def test_export_of_a_folder_takes_the_best_or_the_newest(ckpt, three, tmp_path):
    for words, name in (
        (("--max-key", "loss"), "one"),
        (("--min-key", "loss"), "two"),
        ((), "middle"),
    ):
        to = ("--recoverable", "model", "--output", tmp_path / f"{name}.pt")
        assert ckpt("export", three.path, *words, *to)[1][0] == f"from CKPT+{name}"


class Tied(nn.Module):
    """One tensor under two names, a view, a transposed one, and a state that is none."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.register_buffer("view", torch.arange(10.0)[2:4])
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())

    def get_extra_state(self):
        return {"version": 3}


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_export_of_shared_memory_and_of_what_is_no_tensor(ckpt, tmp_path, form):
    net = Tied()
    checkpoint = Checkpointer(tmp_path / "save", {"model": net}).save_checkpoint()
    output = tmp_path / "out"
    words = ("--recoverable", "model", "--output", output, "--format", form)
    status, _, err = ckpt("export", checkpoint.path, *words)
    assert status == 0
    assert len(err) == 1
    assert "left out, because they are not tensors: _extra_state." in err[0]
    if form == "pt":
        state = torch.load(output, weights_only=True)
    else:
        from safetensors.torch import load_file

        state = load_file(output)
    for name, value in net.state_dict().items():
        if name != "_extra_state":
            assert torch.equal(state[name], value)
    assert "_extra_state" not in state


def test_export_of_what_safetensors_cannot_hold(ckpt, tmp_path):
    folder = tmp_path / "CKPT+a"
    folder.mkdir()
    (folder / "CKPT.yaml").write_text("unixtime: 1\n")
    torch.save({"a": torch.ones(2, 2).to_sparse()}, folder / "sparse.ckpt")
    torch.save({"a": torch.ones(2, dtype=torch.complex128)}, folder / "complex.ckpt")
    for name in ("sparse", "complex"):
        output = tmp_path / f"{name}.safetensors"
        status, _, err = ckpt("export", folder, "--recoverable", name, "--output", output)
        assert status == 1
        assert "as safetensors" in err[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["CKPT+a"]


def test_safetensors_that_is_not_installed_is_named(ckpt, three, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    status, _, err = ckpt(
        "export",
        three.path,
        "--recoverable",
        "model",
        "--output",
        tmp_path / "a.safetensors",
    )
    assert status == 1
    assert "run `pip install safetensors`, or give --format=pt" in err[0]
    assert not (tmp_path / "a.safetensors").exists()


def test_an_output_that_must_not_be_written(ckpt, three, tmp_path):
    output = tmp_path / "out.pt"
    output.write_text("precious")
    words = ("export", three.path, "--recoverable", "model", "--output")
    status, _, err = ckpt(*words, output)
    assert (status, output.read_text()) == (1, "precious")
    assert "is there already. Give --force to replace it" in err[0]
    assert ckpt(*words, output, "--force")[0] == 0
    assert torch.load(output, weights_only=True)
    for path, message in (
        (tmp_path / "nowhere" / "out.pt", "No such file or directory"),
        (three.path / "CKPT+two" / "out.pt", "is inside a checkpoint"),
        (three.path / "CKPT+two" / "model.ckpt", "is there already"),
    ):
        before = picture(tmp_path)
        status, _, err = ckpt(*words, path)
        assert status == 1
        assert message in err[0]
        assert picture(tmp_path) == before
    status, _, err = ckpt(*words, three.path / "CKPT+two" / "model.ckpt", "--force")
    assert "is inside a checkpoint" in err[0]
    (tmp_path / "folder.pt").mkdir()
    assert "Is a directory" in ckpt(*words, tmp_path / "folder.pt", "--force")[2][0]


def test_an_output_that_fails_on_the_way_leaves_the_old_one(ckpt, three, tmp_path, monkeypatch):
    output = tmp_path / "out.pt"
    output.write_text("precious")

    def full(state, handle):
        handle.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    words = ("export", three.path, "--recoverable", "model", "--output", output, "--force")
    status, _, err = ckpt(*words)
    assert status == 1
    assert err == [
        (f"python -m ddpkit: error: cannot write '{output}' as pt: No space left on device.")
    ]
    assert output.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.pt", "save"]


# -------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("list",), "invalid choice: 'list'"),
        (("show",), "the following arguments are required: CKPT"),
        (("ls", "--json"), "unrecognized arguments: --json"),
        (
            ("average", ".", "--output", "a.pt"),
            ("the following arguments are required: --recoverable"),
        ),
        (
            ("average", ".", "--recoverable", "m", "--output", "a.pt", "--num", "0"),
            "'0' is not a whole number from 1 on",
        ),
        (
            (
                "export",
                ".",
                "--recoverable",
                "m",
                "--output",
                "a.pt",
                "--min-key",
                "a",
                "--max-key",
                "b",
            ),
            "not allowed with argument",
        ),
        (
            ("export", ".", "--recoverable", "m", "--output", "a.zip"),
            ("the suffix is none of .safetensors, .pt"),
        ),
    ],
)
def test_wrong_usage(ckpt, words, message):
    status, out, err = ckpt(*words)
    assert (status, out) == (2, [])
    assert err[0].startswith("usage: python -m ddpkit ckpt")
    assert message in err[-1]


def test_help_names_the_commands(ckpt):
    status, out, _ = ckpt("--help")
    assert status == 0
    assert [line.split()[0] for line in out if line.startswith("    ") and line[4] != " "] == [
        "ls", "show", "verify", "average", "export",
    ]  # fmt: skip


def test_help_does_not_load_torch():
    script = (
        "import sys\nfrom ddpkit.cli import main\ntry:\n  main(['ckpt', '--help'])\nexcept "
        "SystemExit: pass\n"
    )
    script += "assert not {'torch', 'numpy'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------- looking only


READING = [
    ("ls",),
    ("show", "--tensors"),
    ("verify",),
]


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_looking_changes_nothing(ckpt, three, words, monkeypatch):
    flip_a_byte(three.path / "CKPT+one" / "model.ckpt")
    (three.path / "CKPT+half").mkdir()
    for name in (".tmp-0123", ".trash-of-CKPT+lost"):
        (three.path / name).mkdir()
    before = picture(three.path)

    def refuse(*arguments, **options):
        pytest.fail("a command that looks must not write")

    for name in ("make_directory", "write", "rename", "remove_tree", "sync_file", "sync_directory"):
        monkeypatch.setattr(storage.FileOperations, name, refuse)
    status, _, err = ckpt(words[0], three.path, *words[1:])
    assert status == (1 if words == ("verify",) else 0)
    assert err == []
    assert picture(three.path) == before


def test_looking_opens_nothing_for_writing(three, tmp_path):
    """As the operating system sees it: a hook on every open, in a process of its own."""
    script = f"""
import os, sys
sys.dont_write_bytecode = True
from ddpkit.cli import main
bad = []
def watch(event, arguments):
    if event == "open" and str(arguments[0]).startswith({str(three.path)!r}):
        if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            bad.append(arguments)
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime", "os.link", "os.chmod", "fcntl.flock"):
        bad.append((event, arguments))
sys.addaudithook(watch)
for words in (["ls"], ["show", "--tensors"], ["verify"]):
    assert main(["ckpt", words[0], {str(three.path)!r}, *words[1:]]) == 0
assert not bad, bad
"""  # noqa: E501
    (tmp_path / "look.py").write_text(script)
    looked = Run(python("look.py"), tmp_path, warm=True).wait()
    assert looked.code == 0, looked.err


# ------------------------------------------------------------------------------------------ hostile


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A checkpoint without a manifest, to be filled with what a friend would not send; the folder
    to run in.
    """
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "save" / "CKPT+evil"
    path.mkdir(parents=True)
    (path / "CKPT.yaml").write_text("unixtime: 1.5\n")
    yield path
    assert not (tmp_path / "ran").exists()


ALL = [("ls",), ("show", "--tensors"), ("verify",)]


def all_commands(ckpt, path, output="out.pt"):
    """Run everything on a folder; return all that was said. Only errors, never an exception."""
    said = []
    for words in (*ALL, ("export", "--recoverable", "model", "--output", output)):
        status, out, err = ckpt(words[0], path, *words[1:])
        assert status in {0, 1}
        said += [*out, *err]
    return said


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_pickle_that_runs_code_does_not(ckpt, hostile, protocol, how):
    if how == "torch":
        torch.save(
            {"w": torch.ones(1), "x": Evil()},
            hostile / "model.ckpt",
            pickle_protocol=protocol,
        )
    else:
        (hostile / "model.ckpt").write_bytes(pickle.dumps(Evil(), protocol))
    said = "\n".join(all_commands(ckpt, hostile.parent))
    assert "cannot load" in said


def test_a_meta_file_that_runs_code_does_not(ckpt, hostile):
    (hostile / "CKPT.yaml").write_text(
        "unixtime: 1.5\nloss: !!python/object/apply:os.mkdir [ran]\nx: !!python/name:os.system\n"
    )
    (hostile / "counter.ckpt").write_text("!!python/object/apply:os.mkdir [ran]")
    (hostile / "brain.ckpt").write_text(
        "step: !!python/object/apply:os.mkdir [ran]\noptimizer_step: {a: [b]}"
    )
    torch.save({"w": torch.ones(1)}, hostile / "model.ckpt")
    assert "UnreadableValue" in "\n".join(all_commands(ckpt, hostile.parent))


def test_names_that_would_command_the_terminal_are_shown_as_text(ckpt, hostile):
    evil = "\x1b[2J\x1b]0;owned\x07\nCKPT+fake  2026  ok\u202e"
    other = hostile.with_name(f"CKPT+{evil}")
    hostile.rename(other)
    (other / f"{evil}.ckpt").write_text(evil)
    (other / os.fsdecode(b"\xff\xfe.ckpt")).write_text("")
    meta = {"unixtime": 1.5, evil: evil, "loss": [evil]}
    (other / "CKPT.yaml").write_text(yaml.safe_dump(meta))
    for line in all_commands(ckpt, other.parent):
        assert line.isprintable(), repr(line)
    _, out, _ = ckpt("ls", other.parent)
    assert sum(line.startswith("CKPT+") for line in out) == 1


@pytest.mark.costly
def test_yaml_that_never_ends_ends(ckpt, hostile):
    laughs = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))
    (hostile / "CKPT.yaml").write_text(f"unixtime: 1\nself: &s [*s]\na0: &a0 [lol]\n{laughs}\n")
    started = time.monotonic()
    said = all_commands(ckpt, hostile.parent)
    assert soon(started, 10)
    assert sum(map(len, said)) < 200_000
    (hostile / "CKPT.yaml").write_text("unixtime: " + "[" * 600)  # deeper than Python's stack
    assert "CKPT.yaml: invalid YAML" in "\n".join(all_commands(ckpt, hostile.parent))
    (hostile / "CKPT.yaml").write_text(f"unixtime: {'9' * 5000}\n")
    all_commands(ckpt, hostile.parent)
    (hostile / "CKPT.yaml").write_text("unixtime: 1.0e+300\n")
    all_commands(ckpt, hostile.parent)


@pytest.mark.parametrize(
    "name",
    ["CKPT.yaml", "manifest.json", "model.ckpt", "brain.ckpt", "counter.ckpt"],
)
@pytest.mark.parametrize("kind", ["pipe", "device", "broken link", "directory"])
def test_a_file_that_is_none_is_not_opened(ckpt, hostile, name, kind):
    (hostile / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(hostile / name)
    elif kind == "device":
        (hostile / name).symlink_to("/dev/zero")
    elif kind == "broken link":
        (hostile / name).symlink_to("nowhere")
    else:
        (hostile / name).mkdir()
    said = "\n".join(all_commands(ckpt, hostile.parent))
    assert kind == "directory" or f"damaged: {name}" in said


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "link/zero"])
def test_a_manifest_that_names_files_elsewhere(ckpt, three, name):
    path = three.path / "CKPT+two"
    (path.parent / "outside").write_text("x")
    (path / "link").symlink_to("/dev")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("digest")
    manifest["files"][name] = {"size": 0 if name == "link/zero" else 1, "sha256": "0"}
    manifest["digest"] = storage._manifest_digest(manifest)
    (path / "manifest.json").write_text(json.dumps(manifest))
    status, out, _ = ckpt("verify", path)
    assert status == 1
    assert repr(name) in out[0]


def test_a_file_that_would_blow_up_is_not_loaded(ckpt, hostile):
    torch.save({"w": torch.zeros(1_000_000)}, hostile / "plain.ckpt")
    with (
        zipfile.ZipFile(hostile / "plain.ckpt") as source,
        zipfile.ZipFile(hostile / "model.ckpt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert (hostile / "model.ckpt").stat().st_size < 20_000
    assert "it would unpack to more than it holds" in "\n".join(all_commands(ckpt, hostile.parent))


@pytest.mark.costly
def test_manifests_of_any_shape(ckpt, three):
    path = three.path / "CKPT+two" / "manifest.json"
    for text in (
        "",
        "[]",
        "null",
        "{",
        '{"files": 3}',
        '{"world_size": {"a": [1]}}',
        "[" * 100_000,
        "\xff",
    ):
        path.write_text(text, encoding="latin-1")
        said = "\n".join(all_commands(ckpt, three.path, output=three.path / "out.pt"))
        (three.path / "out.pt").unlink(missing_ok=True)
        assert "manifest.json" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))],
)
def test_damage_of_any_kind_gives_words_and_no_exception(ckpt, three, tmp_path, seed):
    import random

    random.seed(seed)
    for path in sorted((three.path / "CKPT+two").iterdir()):
        content = bytearray(path.read_bytes())
        for _ in range(8):
            if random.random() < 0.5:
                changed = content[: random.randrange(len(content))]
            else:
                changed = bytearray(content)
                changed[random.randrange(len(content))] ^= 1 << random.randrange(8)
            path.write_bytes(changed)
            for words in (("show", "--tensors"), ("verify",)):
                status, out, _ = ckpt(words[0], path.parent, *words[1:])
                assert status in {0, 1}
                assert out
            assert status == 1
        path.write_bytes(content)


# ---------------------------------------------------------------------------------------- processes


def list_to(three, out):
    """List the checkpoints in a process that writes to a file; return its exit code and its words
    on stderr.
    """
    with tempfile.TemporaryFile("w+") as err:
        code = WarmProcess([*PROGRAM, "ls", str(three.path)], stdout=out, stderr=err).wait()
        err.seek(0)
        return code, err.read()


def test_whoever_reads_may_stop_reading(three):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        assert list_to(three, pipe) == (-signal.SIGPIPE, "")


def test_an_output_that_cannot_take_more_is_an_error_without_a_traceback(three):
    with Path("/dev/full").open("w") as full:
        assert list_to(three, full) == (
            1,
            ("python -m ddpkit: error: [Errno 28] No space left on device\n"),
        )


def test_an_output_that_knows_no_unicode(three, monkeypatch, capsys):
    three.save("µ", 9000, note="naïve")
    out = io.BytesIO()
    with (
        io.TextIOWrapper(out, "ascii", write_through=True) as stdout,
        monkeypatch.context() as patch,
    ):
        patch.setattr(sys, "stdout", stdout)  # as with PYTHONIOENCODING=ascii
        assert main(["ckpt", "ls", str(three.path)]) == 0
        assert rb"CKPT+\xb5" in out.getvalue()
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_quietly(three, monkeypatch, capsys):
    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    monkeypatch.setattr("ddpkit.cli.checkpoint_commands.find", interrupted)
    assert main(["ckpt", "ls", str(three.path)]) == 130
    assert capsys.readouterr().err == ""


def test_a_checkpoint_that_is_deleted_while_it_is_looked_at(ckpt, three, monkeypatch):
    import shutil

    from ddpkit.cli import checkpoint_commands as commands

    real = commands.read_checkpoint

    def race(path):
        if path.name == "CKPT+two":
            shutil.rmtree(path)
        return real(path)

    monkeypatch.setattr(commands, "read_checkpoint", race)
    status, out, _ = ckpt("ls", three.path)
    assert status == 0
    assert "CKPT.yaml cannot be read" in "\n".join(out)


# -------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (999, "999B"),
        (1000, "1.0kB"),
        (99_960, "100.0kB"),
        (999_499, "999.5kB"),
        (5 * 10**12, "5.0TB"),
    ],
)
def test_sizes(size, text):
    assert size_text(size) == text


def test_values_of_any_origin():
    endless = []
    endless.append(endless)
    assert value_text(endless) == "[[[[[...]]]]]"
    assert value_text({"a": [1, 2.5, None, "x\ny"]}) == r"{'a': [1, 2.5, None, 'x\ny']}"
    assert value_text("x" * 500, 20) == "x" * 16 + " ..."
    assert value_text(float("nan")) == "nan"
    assert value_text({3: (float("inf"), b"x")}) == "{3: (inf, b'x')}"
    assert printable("ü\t\u202e") == "ü\\t\\u202e"
