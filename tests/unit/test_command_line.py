from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from hyperpyyaml import load_hyperpyyaml

import ddpkit
from ddpkit.command_line import help_text
from ddpkit.errors import ConfigError, LaunchError, MissingFileError
from ddpkit.run_opts import OPTIONS, RunOptions
from tests.command_lines import (
    LAUNCHER,
    YAML_TEXT,
    hparams_yaml,  # noqa: F401 -- fixtures
    launched_fixture,  # noqa: F401 -- fixtures
    overrides,
    parse,
)

# --------------------------------------------------------------------- the faults of REGRESSIONS.md


def test_the_page_of_the_options_is_the_help():
    page = Path(__file__).parents[2] / "docs" / "reference" / "run_opts.md"
    assert f"```text\n{help_text()}```" in page.read_text()


def test_optimizer_step_limit_is_an_int():
    for words in (["--optimizer_step_limit=10"], ["--optimizer_step_limit", "10"]):
        limit = parse("h.yaml", *words)[1].optimizer_step_limit
        assert (limit, type(limit)) == (10, int)
    with pytest.raises(
        ConfigError,
        match="--optimizer_step_limit expects a whole number, got 'ten'",
    ):
        parse("h.yaml", "--optimizer_step_limit=ten")


def test_a_yaml_key_is_no_abbreviated_option():
    _, options, text = parse("h.yaml", "--optimizer=adam")
    assert text == "optimizer: adam"
    assert options.optimizer_step_limit is None
    (file := open("h.yaml", "a")).write("log: a\nmax: 1\ndata: b\nckpt: c\nd: e\n")  # noqa: PTH123, SIM115
    file.close()
    words = ["--log=x", "--max=5", "--data=/x", "--ckpt=5", "--d=1"]
    assert parse("h.yaml", *words)[2] == "log: x\nmax: 5\ndata: /x\nckpt: 5\nd: 1"


def test_an_abbreviated_option_is_an_error_with_the_whole_name():
    with pytest.raises(ConfigError, match="did you mean --debug_batches"):
        parse("h.yaml", "--debug_batch=5")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--seed", "3", "h.yaml"], "seed: 3"),
        (["--seed=3", "h.yaml"], "seed: 3"),
        (["h.yaml", "--seed", "3"], "seed: 3"),
        (["--flag", "h.yaml"], "flag: True"),
        (["--flag", "h.yaml", "--seed=3"], "flag: True\nseed: 3"),
        (["--debug", "h.yaml"], ""),
        (["--seed", "3", "--", "h.yaml"], "seed: 3"),
        (["--other_yaml", "o.yaml", "h.yaml"], "other_yaml: o.yaml"),
        (["--lr", "-1", "h.yaml"], "lr: -1"),
        (["--max_grad_norm", "-1", "h.yaml"], ""),
    ],
)
def test_the_yaml_may_stand_anywhere(words, text):
    file, _, found = parse(*words)
    assert (file, found) == ("h.yaml", text)


def test_the_yaml_may_follow_a_list():
    file, options, _ = parse("--jit_module_keys", "a", "b", "h.yaml")
    assert (file, options.jit_module_keys) == ("h.yaml", ["a", "b"])
    assert parse("h.yaml", "--jit_module_keys", "a", "b", "--debug")[1].jit_module_keys == [
        "a",
        "b",
    ]
    assert parse("h.yaml", "--compile_module_keys=a,b")[1].compile_module_keys == ["a", "b"]


def test_a_yaml_without_the_suffix(tmp_path):
    (tmp_path / "hparams").write_text(YAML_TEXT)
    assert parse("hparams", "--seed=3")[0] == "hparams"
    assert parse("--flag", "hparams")[0] == "hparams"


def test_two_yamls_are_not_guessed_between(tmp_path):
    with pytest.raises(ConfigError, match=r"found: 'h.yaml', 'o.yaml'. Put it first"):
        parse("--flag", "h.yaml", "--other_yaml", "o.yaml")
    with pytest.raises(ConfigError, match="found: 'h.yaml', 'o.yaml'"):
        parse("h.yaml", "o.yaml")


def test_values_keep_their_equals_signs():
    assert overrides("--url=http://x/?a=1&b=2")["url"] == "http://x/?a=1&b=2"
    assert overrides("--url", "http://x/?a=1")["url"] == "http://x/?a=1"


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("--debug", True),
        *((f"--debug={w}", True) for w in ("True", "true", "yes", "1", "on")),
        *((f"--debug={w}", False) for w in ("False", "false", "no", "0", "off")),
    ],
)
def test_a_switch_takes_a_value(word, value):
    options = parse("h.yaml", word)[1]
    assert options.debug is value
    assert options.overridden_args == {"debug"}


def test_a_switch_turns_off_what_the_yaml_turns_on(tmp_path):
    (tmp_path / "h.yaml").write_text("debug: True\n")
    assert parse("h.yaml")[1].debug is True
    options = parse("h.yaml", "--debug=False")[1]
    assert options.debug is False
    assert options.resolved({"debug": True}).debug is False


def test_a_switch_never_swallows_a_word():
    with pytest.raises(ConfigError, match=r"found: 'h.yaml', 'False'. .*--debug=False"):
        parse("h.yaml", "--debug", "False")
    with pytest.raises(ConfigError, match="--debug expects true or false, got 'maybe'"):
        parse("h.yaml", "--debug=maybe")


def test_minutes_are_a_float():
    assert parse("h.yaml", "--ckpt_interval_minutes=0.5")[1].ckpt_interval_minutes == 0.5
    assert (
        parse("h.yaml", "--distributed_timeout_minutes", "2.5")[1].distributed_timeout_minutes
        == 2.5
    )


def test_pain24_arguments_of_old_launchers_are_accepted(launched, monkeypatch, caplog):
    for word in ("--local_rank=1", "--local-rank=1"):
        assert parse("h.yaml", word)[2] == ""
    monkeypatch.delenv("LOCAL_RANK")
    options = parse("h.yaml", "--local_rank", "1", "--distributed_launch")[1]
    assert os.environ["LOCAL_RANK"] == "1"
    assert options.distributed_launch is True
    assert "local_rank" not in options
    # this is rank 1: main alone speaks
    assert [r.getMessage().split(":")[0] for r in caplog.records] == []


def test_pain24_distributed_launch_has_no_effect(caplog):
    with caplog.at_level(logging.WARNING):
        options = parse("h.yaml", "--distributed_launch=True", "--local_rank=-1")[1]
    assert options.distributed_launch is False
    assert "LOCAL_RANK" not in os.environ
    (record,) = caplog.records
    assert "--distributed_launch has no effect" in record.getMessage()


def test_pain24_a_contradicting_local_rank(launched, monkeypatch):
    assert parse("h.yaml", "--local_rank=0")[1].distributed_launch, "the environment wins"
    assert os.environ["LOCAL_RANK"] == "1"
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match="RANK is not set"):
        parse("h.yaml", "--local_rank=0")


def test_options_made_by_hand_count():
    options = RunOptions(precision="bf16", device=torch.device("cpu"))
    assert options.overridden_args == {"precision", "device"}
    assert options.resolved({"precision": "fp16"}).precision == "bf16"
    assert options.resolved().device == "cpu"


# -------------------------------------------------------------------------------- overrides as YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-1", -1),
        ("1e-3", 0.001),
        ("null", None),
        ("True", True),
        ("[1, 2]", [1, 2]),
        ("(1, 2)", (1, 2)),
        ("'3'", "3"),
        ('"a b"', "a b"),
        ("!ref <seed>", 1),
        ("plain text", "plain text"),
        ("C:\\temp", "C:\\temp"),
        ("a: b", "a: b"),
        ("a:", "a:"),
        ("a #b", "a #b"),
        ("#b", "#b"),
        ("*.wav", "*.wav"),
        ("&a", "&a"),
        ("@home", "@home"),
        ("`x`", "`x`"),
        ("%x", "%x"),
        ("- a", "- a"),
        ("|", "|"),
        (">", ">"),
        ("? a", "? a"),
        ("'a", "'a"),
        ('"a', '"a'),
        ("'a' b", "'a' b"),
        (" a ", " a "),
        ("a\nb: c", "a\nb: c"),
        ('a\tb\\n"q"', 'a\tb\\n"q"'),
        ("grün 😀: x", "grün 😀: x"),
        ("a\x01", "a\x01"),
        ("a: \x7f\x85", "a: \x7f\x85"),
        ("data/\udcff", "data/\udcff"),  # a file's name that is not UTF-8
    ],
)  # fmt: skip
def test_override_values_mean_what_was_typed(text, value):
    assert overrides(f"--name={text}")["name"] == value


def test_an_override_may_be_a_mapping(tmp_path):
    (tmp_path / "h.yaml").write_text("net: {a: 1, b: 2}\n")
    text = parse("h.yaml", "--net={a: 3}")[2]
    assert load_hyperpyyaml("net: {a: 1, b: 2}", text)["net"] == {"a": 3, "b": 2}


def test_the_last_override_of_a_key_wins():
    assert parse("h.yaml", "--seed=1", "--seed=2")[2] == "seed: 2"
    assert parse("h.yaml", "--debug_batches=1", "--debug_batches=3")[1].debug_batches == 3


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--sed=3", "; did you mean --seed"),
        ("--optimizer_step_limt=5", "; did you mean --optimizer_step_limit"),
        ("--zzz=1", "."),
    ],
)
def test_an_override_that_matches_nothing_names_what_comes_close(word, meant):
    with pytest.raises(ConfigError) as caught:
        parse("h.yaml", word)
    name = word.partition("=")[0]
    assert str(caught.value).startswith(
        f"{name} is neither a run option nor a key of 'h.yaml'{meant}"
    )


def test_reading_the_keys_runs_nothing(tmp_path):
    parse("h.yaml", "--danger=3")
    assert not (tmp_path / "PWNED").exists()


def test_keys_that_come_by_merge_are_keys(tmp_path):
    text = "base: &b {x: 1}\nmore: &m {y: 1}\n<<: [*b, *m]\nz: 1\n"
    (tmp_path / "h.yaml").write_text(text)
    assert parse("h.yaml", "--x=2", "--y=3", "--z=4")[2] == "x: 2\ny: 3\nz: 4"


# ------------------------------------------------------------------------------------------- errors


def test_missing_yaml(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for word in ("pipe", str(tmp_path)):
        with pytest.raises(MissingFileError, match=f"There is no file '{word}'"):
            parse(word)
    with pytest.raises(MissingFileError, match="There is no file 'nowhere.yaml'"):
        parse("nowhere.yaml")
    with pytest.raises(FileNotFoundError, match="There is no file 'nowhere'"):
        parse("--flag", "h.yaml", "nowhere")
    with pytest.raises(ConfigError, match="Give one hyperparameter YAML; found: none"):
        parse("--debug")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a: [1\nb: 2\n", "'bad.yaml' is not valid YAML: .* line 2, column"),
        (b"a: \xff\n", "'bad.yaml' cannot be read as a text file"),
        (b"- a\n", "must hold `key: value` lines"),
        (b"", "must hold `key: value` lines"),
        (b"a: 1\n---\nb: 2\n", "is not valid YAML"),
        (b"a: \x01\n", "is not valid YAML"),
    ],
)
def test_yaml_that_cannot_be_used(tmp_path, content, reason):
    (tmp_path / "bad.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        parse("bad.yaml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_an_unreadable_yaml(tmp_path):
    (tmp_path / "h.yaml").chmod(0)
    with pytest.raises(ConfigError, match="cannot be read"):
        parse("h.yaml")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--precision=fp8"], "--precision expects one of fp32, fp16, bf16, got 'fp8'"),
        (["--eval_precision", "x"], "--eval_precision expects one of fp32, fp16, bf16, got 'x'"),
        (["--grad_accumulation_factor=0"],
        "--grad_accumulation_factor expects a number >= 1, got '0'"),
        (["--debug_batches=-1"], "--debug_batches expects a number >= 1, got '-1'"),
        (["--nonfinite_patience=-1"], "--nonfinite_patience expects a number >= 0, got '-1'"),
        (["--distributed_timeout_minutes=0"], "timeout_minutes expects a number > 0, got '0'"),
        (["--max_grad_norm=nan"], "--max_grad_norm expects a number, got 'nan'"),
        (["--max_grad_norm=x"],
        "--max_grad_norm: clip gradients to this 2-norm; 0 or less: never (default: 5.0)"),
        (["--debug_batches=1.5"], "--debug_batches expects a whole number, got '1.5'"),
        (["--precision"], "--precision needs a value, --precision=fp32|fp16|bf16"),
        (["--precision", "--debug"], "--precision needs a value"),
        (["--device=cuda:9"], "device='cuda:9'"),
        (["--ckpt_interval_minutes=1", "--ckpt_interval_steps=5"],
        "1.0 and ckpt_interval_steps=5 are both"),
        (["--data_parallel_backend"],
        "data_parallel_backend=True means all GPUs from one process: it needs a GPU"),
        (["stray"], "found: 'h.yaml', 'stray'"),
        (["-v"], "found: 'h.yaml', '-v'"),
    ],
)  # fmt: skip
def test_bad_values_are_named_with_the_remedy(words, reason):
    with pytest.raises(ConfigError) as caught:
        parse("h.yaml", *words)
    assert reason in str(caught.value)


@pytest.mark.parametrize("words", [["--data_parallel_backend"], ["--data_parallel_backend=True"]])
def test_data_parallel_under_a_launcher_shows_both_commands(launched, words):
    with pytest.raises(ConfigError) as caught:
        parse("h.yaml", *words)
    assert "python train.py hparams.yaml --data_parallel_backend" in str(caught.value)
    assert "torchrun --standalone --nproc_per_node=N train.py hparams.yaml" in str(caught.value)


def test_data_parallel_in_the_yaml_under_a_launcher(launched, tmp_path):
    (tmp_path / "h.yaml").write_text("data_parallel_backend: True\n")
    with pytest.raises(ConfigError, match="launcher environment, 2 process"):
        parse("h.yaml")
    with pytest.raises(ConfigError, match="launcher environment, 2 process"):
        RunOptions().resolved({"data_parallel_backend": True})


# --------------------------------------------------------------------------------- help and version


@pytest.mark.parametrize(
    "words",
    [["--help"], ["-h"], ["h.yaml", "--seed", "3", "--help"], ["--flag", "-h"]],
)
def test_help_prints_and_stops(capsys, words):
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "torchrun --standalone --nproc_per_node=N train.py hparams.yaml" in out
    assert "python train.py hparams.yaml --data_parallel_backend" in out


def test_help_has_one_line_per_option_with_its_default():
    lines = help_text().splitlines()
    assert max(map(len, lines)) <= 100
    for option in OPTIONS:
        mine = [line for line in lines if line.split()[:1] == [f"--{option.name}"]]
        assert len(mine) == bool(option.group), option.name
        assert all(line.endswith(f"[{option.shown_default}]") for line in mine), option.name


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith(
        f"ddpkit {ddpkit.__version__} (torch {torch.__version__}"
    )


@pytest.mark.parametrize("value", ["[1,2", "{a: 1", "[[1]", " {"])
def test_a_bracket_that_is_not_closed_is_an_error_and_no_text(value):
    with pytest.raises(
        ConfigError,
        match="the bracket at its beginning is not closed",
    ):
        parse("h.yaml", f"--seed={value}")


@pytest.mark.parametrize("value", ["[ab]*.wav", "{x}.txt", "a[b", "100%", "'[a'"])
def test_a_text_with_brackets_stays_a_text(value):
    Path("h.yaml").write_text("name: x\n")
    read = load_hyperpyyaml("name: x\n", parse("h.yaml", f"--name={value}")[2])
    assert read["name"] == value.strip("'")


def test_a_switch_without_a_value_is_turned_on_and_other_keys_need_one():
    (file := open("h.yaml", "a")).write("off: false\nempty:\n")  # noqa: PTH123, SIM115
    file.close()
    assert parse("h.yaml", "--off", "--flag")[2] == "off: True\nflag: True"
    for key in ("seed", "empty"):
        with pytest.raises(
            ConfigError,
            match=rf"^--{key} needs a value, .*: --{key}=\.\.\. "
            r"\(null for none\)\.$",
        ):
            parse("h.yaml", f"--{key}")
    assert parse("h.yaml", "--seed=null")[2] == "seed: null"
