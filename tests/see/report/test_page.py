"""The page about a run, as the command writes it."""

from __future__ import annotations

import html
import json
import re
import stat

import pytest

from ddpkit.cli import main
from ddpkit.cli.report import run as report
from ddpkit.see import find_runs, read_run
from ddpkit.see.report import page as page_module
from ddpkit.see.report.page import MOST_BYTES
from tests.see.report.made_runs import Writer, killed_and_resumed


def page_of(tmp_path, *runs):
    file = tmp_path / "page.html"
    assert report([*map(str, runs), "-o", str(file)]) == 0
    return file.read_text(encoding="utf-8")


def text_of(page):
    """What a reader sees, without pictures."""
    page = re.sub(r"<(svg|style|script)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def a_short_run(folder):
    run = Writer(folder)
    run.start()
    run.event("stats", meta={"epoch": 1}, train={"loss": 0.5}, valid={"loss": 0.6})
    return run.close()


@pytest.mark.slow
def test_a_run_that_was_killed_and_resumed(tmp_path, capsys):
    folder = killed_and_resumed(tmp_path / "1234", options={"precision": "bf16"})
    (folder / "log.txt").write_text("first line\nlast line <b>bold</b>\n")
    (folder / "hyperparams.yaml").write_text("lr: 0.1\nnet: !new:torch.nn.Linear\n  - 3\n")
    (folder / "env.log").write_text("Python 3.11\n=====\nnumpy==2.4.6\n")
    page = page_of(tmp_path, folder)
    assert re.fullmatch(r".*page\.html: \d+ kB\n", capsys.readouterr().out)
    words = text_of(page)
    for expected in (
        "1234 finished",
        "optimizer steps 1 500",
        "goodput 53.5 %",
        "1 restart",
        "Goodput is the share of the wall time that went into steps that counted.",
        "Rank 2 is late in its forward pass. 12 ms of a step of 116 ms.",
        "Try to look at what else runs on its machine.",
        "ended without a word 600 150 15 s 1 min 20 s 1 min 35 s",
        "CKPT+5 best error not here",
        "precision bf16",
        "net !new:torch.nn.Linear net[0] 3",
        "numpy 2.4.6",
        "last line <b>bold</b>",
    ):
        assert expected in words
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert titles == [
        "loss",
        "lr",
        "error",
        "mean training loss of the epoch",
        "learning rate",
        "gradient norm",
        "steps with clipped gradients",
        "samples per second",
        "time of a step",
        "split of a step",
        "wait for the other ranks",
        "memory of a process (RSS)",
        "GPU memory in use",
    ]
    assert not re.search(r"(?:src|href)=\"(?!#|data:,)", page), "nothing comes from elsewhere"
    assert len(page.encode()) < 300_000


@pytest.mark.costly
def test_several_runs_say_what_differs(tmp_path):
    folders = []
    for name, precision, rate in (("1", "bf16", 0.1), ("2", "fp16", 0.2)):
        run = Writer(tmp_path / name)
        run.start(options={"precision": precision, "debug": True})
        run.event("speed", optimizer_step=1, seconds=1.0, phases={"data": {"median": rate}})
        run.event("step", optimizer_step=2, values={"loss": rate})
        run.event("stats", meta={"epoch": 1}, test={"error": rate})
        folders.append(run.close())
        (folders[-1] / "hyperparams.yaml").write_text(f"lr: {rate}\nseed: 1\n")
        (folders[-1] / "env.log").write_text(f"torch==2.{name}\nnumpy==2.4.6\n")
    page = page_of(tmp_path, *folders)
    words = text_of(page)
    assert "Results 1 2 test error 0.1 0.2" in words
    assert "Options 1 2 precision bf16 fp16 Hyperparameters 1 2 lr 0.1 0.2" in words
    assert "Packages 1 2 torch 2.1 2.2" in words
    assert "loss, by step optimizer step 1 · train 2 · train" in words, "a curve for each run"
    assert "split of a step of 2" in words


@pytest.mark.costly
def test_a_picture(tmp_path):
    folder = a_short_run(tmp_path / "run $_{1}")
    file = tmp_path / "overview.png"
    assert report([str(folder), "-o", str(tmp_path / "page.html"), "--png", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


STATES = {
    "only started": [],
    "stopped": [("speed", {}), ("stopped", {"reason": "SIGTERM", "optimizer_step": 10})],
    "failed": [("speed", {}), ("exception", {"type": "ValueError", "message": "bad batch"})],
    "ended or killed": [("speed", {})],
    "finished": [("speed", {}), ("fit_end", {})],
}


@pytest.mark.parametrize("state", STATES)
def test_what_became_of_a_run(tmp_path, state):
    run = Writer(tmp_path / "run")
    run.start()
    for event, fields in STATES[state]:
        if event == "speed":
            run.second(1, 10)
        else:
            run.event(event, **fields)
    assert read_run(*find_runs([run.close()])).state == state


def test_a_failure_is_told(tmp_path):
    run = Writer(tmp_path / "run")
    run.start()
    run.event("exception", type="ValueError", message="bad batch\nof rank 3")
    words = text_of(page_of(tmp_path, run.close()))
    assert words.startswith("run run failed")
    assert "ValueError: bad batch" in words


@pytest.mark.slow
def test_a_log_that_is_being_written_or_holds_nothing_yet(tmp_path):
    run = Writer(tmp_path / "run")
    run.start()
    run.second(1, 10)
    words = text_of(page_of(tmp_path, run.close(end='{"event": "spe')))
    assert "The last line of metrics.jsonl has no end" in words
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    assert "Nothing has been logged or measured yet." in text_of(
        page_of(tmp_path, tmp_path / "empty")
    )


@pytest.mark.costly
def test_an_old_run_without_measured_seconds(tmp_path):
    run = Writer(tmp_path / "old")
    run.start()
    for epoch in (1, 2):
        run.time += 10.0
        run.event(
            "stage",
            stage="TRAIN",
            epoch=epoch,
            loss=0.5,
            optimizer_step=30 * epoch,
            seconds=8.0,
        )
        run.event("stats", meta={"epoch": epoch}, train={"loss": 0.5}, valid={"error": 0.1})
    page = page_of(tmp_path, run.close())
    assert "goodput 80 %" in text_of(page)
    assert re.findall(r"<figcaption>(.*?)</figcaption>", page) == ["loss", "error"]
    assert "lr 0.1" in text_of(page), "options from the words of the command line"


@pytest.mark.costly
@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "Verdicts No verdict: no steps of a training were measured."),
        (3, "Verdicts No verdict: 3 s of training were measured, which is too little for one."),
        (
            20,
            (
                "Verdicts No verdict: nothing stood out in 20 s of training. A step took 118 ms; "
                "3 % of it waited for data, 17 % for the other ranks."
            ),
        ),
    ],
)
def test_a_run_without_a_verdict_says_on_what_figures_that_rests(tmp_path, seconds, words):
    run = Writer(tmp_path / "1")
    run.start()
    run.event("stage", stage="TRAIN", epoch=1, loss=1.0, seconds=1.0)
    for number in range(seconds):
        run.second(1, 10 * number)
    assert words in text_of(page_of(tmp_path, run.close()))


@pytest.mark.costly
def test_numbers_that_are_none(tmp_path):
    run = Writer(tmp_path / "run")
    run.start()
    for epoch, loss in enumerate(["NaN", 0.5, "Infinity", 1e300, -1e300], 1):
        run.event("stats", meta={"epoch": epoch}, train={"loss": loss, "all bad": "NaN"})
    words = text_of(page_of(tmp_path, run.close()))
    assert "2 values are NaN or infinite, and not drawn." in words
    assert "5 values are NaN or infinite, and not drawn." in words


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}\x1b[2J$x_1"


@pytest.mark.slow
def test_a_runs_text_is_data(tmp_path):
    run = Writer(tmp_path / "<b>run<script>")
    run.start(
        arguments=["train.py", HOSTILE],
        options={HOSTILE: HOSTILE},
        environment={"a": HOSTILE},
    )
    run.event("stats", meta={"epoch": 1}, train={HOSTILE: 1.0}, valid={HOSTILE: 2.0})
    run.event("stage", stage=HOSTILE, epoch=1, loss=1.0, seconds=1.0)
    run.event("step", optimizer_step=1, values={HOSTILE: 1.0})
    run.event("verdict", kind=HOSTILE, what=HOSTILE, how_much=HOSTILE, **{"try": HOSTILE})
    run.event(
        "checkpoint",
        path=HOSTILE,
        epoch=HOSTILE,
        meta={HOSTILE: 1.0},
        best={HOSTILE: HOSTILE},
    )
    run.event("exception", type=HOSTILE, message=HOSTILE)
    run.start(reason=HOSTILE, resumed_from=HOSTILE)
    folder = run.close()
    (folder / "log.txt").write_text(f"{HOSTILE}\n")
    (folder / "env.log").write_text(f"{HOSTILE}\nx==<script>\n")
    (folder / "hyperparams.yaml").write_text(json.dumps({HOSTILE: HOSTILE}))
    file = tmp_path / "page.html"
    words = ["-o", str(file), "--png", str(tmp_path / "picture.png")]
    assert report([str(folder), str(folder), *words]) == 0
    page = file.read_text(encoding="utf-8")
    assert page.count("<script") == 1
    assert "<img" not in page
    assert "onerror" not in re.sub(r"&lt;img src=x onerror=", "", page)
    assert "{{ 7*7 }}" in page
    assert "\x1b" not in page


def logged_by_step(folder, num_values, num_steps):
    run = Writer(folder)
    run.start()
    for steps in range(1, num_steps + 1):
        values = {f"value {number}": steps * number % 7 for number in range(num_values)}
        run.event("step", optimizer_step=steps, values=values)
    return run.close()


@pytest.mark.slow
def test_long_curves_are_thinned_until_the_page_is_small(tmp_path, monkeypatch):
    folder = logged_by_step(tmp_path / "run", 4, 1000)
    monkeypatch.setattr(page_module, "MOST_BYTES", 60_000)
    page = page_of(tmp_path, folder)
    assert len(page.encode()) <= 60_000
    assert page.count("<figure") == 4
    assert "of every stretch the smallest and the largest value are drawn" in text_of(page)


@pytest.mark.slow
def test_panels_are_left_out_and_named_where_thin_curves_are_not_enough(tmp_path, monkeypatch):
    folder = logged_by_step(tmp_path / "run", 4, 60)
    most = int(0.8 * len(page_of(tmp_path, folder)))
    monkeypatch.setattr(page_module, "MOST_BYTES", most)
    page = page_of(tmp_path, folder)
    assert len(page.encode()) <= most
    assert 0 < page.count("<figure") < 4
    assert re.search(r"Not drawn, to keep the page small: .*value 3, by step\.", text_of(page))


@pytest.mark.slow
def test_hundreds_of_values_fit_on_a_page(tmp_path):
    page = page_of(tmp_path, logged_by_step(tmp_path / "run", 200, 3000))
    assert len(page.encode()) <= MOST_BYTES
    assert "and 120 more." in text_of(page)


@pytest.mark.slow
def test_a_run_of_a_million_steps_fits_on_a_page(tmp_path):
    run = Writer(tmp_path / "run")
    run.start()
    run.second(1, 1)
    start, second = run.lines
    peak = second.replace('"gradient_norm": ', '"gradient_norm": 1234')
    with (tmp_path / "run" / "metrics.jsonl").open("w") as file:
        file.write(f"{start}\n")
        for steps in range(1, 1_000_002, 20):  # a second of each twenty
            line = peak if steps == 654_321 else second
            file.write(line.replace('"optimizer_step": 1,', f'"optimizer_step": {steps},') + "\n")
    page = page_of(tmp_path, tmp_path / "run")
    assert len(page.encode()) <= MOST_BYTES
    norm = page[page.index("<figcaption>gradient norm") - 600 :]
    top = float(re.search(r'data-y="\S+ (\S+)"', norm)[1])
    assert top > 1234, "the peak is there"


@pytest.mark.costly
def test_the_folder_of_a_run_is_not_written_to(tmp_path):
    folder = a_short_run(tmp_path / "run")
    before = sorted(folder.rglob("*"))
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        page_of(tmp_path, folder)
    finally:
        folder.chmod(0o755)
    assert sorted(folder.rglob("*")) == before


def test_mistakes_are_told_in_a_sentence(tmp_path, capsys):
    folder = a_short_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert main(["report", str(folder), "-o", str(tmp_path / "file" / "page.html")]) == 1
    assert "--output='" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "is no folder of a run" in error
    assert f"Runs below it: {str(folder)!r}." in error


def test_a_log_is_never_taken_for_the_page(tmp_path, capsys):
    folder = a_short_run(tmp_path / "run")
    log = folder / "metrics.jsonl"
    before = log.read_bytes()
    for words in (["-o", str(log)], ["--png", str(log)], ["--png", str(tmp_path / "page.html")]):
        assert main(["report", str(folder), *words]) == 1
        assert "the name of this file must end in ." in capsys.readouterr().err
    assert log.read_bytes() == before
    (tmp_path / "folder.html").mkdir()
    assert main(["report", str(folder), "-o", str(tmp_path / "folder.html")]) == 1
    assert "cannot be written: it is a folder." in capsys.readouterr().err


def test_a_missing_package_is_named(tmp_path, monkeypatch, capsys):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "jinja2" else found(name, *more),
    )
    assert main(["report", str(a_short_run(tmp_path / "run"))]) == 1
    assert "pip install jinja2" in (capsys.readouterr().err)
