from __future__ import annotations

import copy
import logging
import pickle
import sys

import numpy as np
import pytest
import torch

from ddpkit.errors import ConfigError
from ddpkit.run_opts import RunOptions, option_attributes, parse_arguments
from tests.command_lines import gpus_fixture, hparams_yaml, launched_fixture, parse  # noqa: F401 -- fixtures

# ----------------------------------------------------------------------------- what parsing returns


def test_parsing_gives_concrete_values():
    file, options, text = parse("h.yaml")
    assert (file, text) == ("h.yaml", "")
    assert (options["device"], options["distributed_backend"]) == ("cpu", "gloo")
    assert options["param_file"] == "h.yaml"
    assert options.overridden_args == set()


def test_the_command_line_is_sys_argv_by_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "h.yaml", "--debug"])
    assert parse_arguments()[1].debug is True
    assert RunOptions.from_command_line_args()[0] == "h.yaml"


def test_the_device_is_the_ranks_own(gpus, launched):
    assert parse("h.yaml")[1]["device"] == "cuda:1"
    options = parse("h.yaml", "--device=cuda:0")[1]
    assert (options["device"], options["distributed_backend"]) == ("cuda:1", "nccl")
    assert options.resolved({"device": "cpu"})["device"] == "cuda:1"


def test_not_enough_gpus(gpus, monkeypatch):
    for name, value in (("RANK", "4"), ("LOCAL_RANK", "4"), ("WORLD_SIZE", "5")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="Not enough GPUs"):
        parse("h.yaml")
    assert parse("h.yaml", "--device=cpu")[1].distributed_backend == "gloo"


def test_the_backend_follows_the_device_unless_given(gpus):
    assert parse("h.yaml")[1].distributed_backend == "nccl"
    assert parse("h.yaml", "--device=cpu")[1].distributed_backend == "gloo"
    assert parse("h.yaml", "--distributed_backend=gloo")[1].resolved().distributed_backend == "gloo"
    assert parse("h.yaml", "--distributed_backend=auto")[1].distributed_backend == "nccl"
    assert parse("h.yaml")[1].resolved({"device": "cpu"}).distributed_backend == "gloo"


def test_options_in_the_yaml_are_seen_at_once(gpus, tmp_path):
    (tmp_path / "h.yaml").write_text(
        "device: cpu\ndebug: True\nmax_grad_norm: null\nprecision: !ref <p>\np: bf16\n"
    )
    options = parse("h.yaml")[1]
    assert (options.device, options.distributed_backend) == ("cpu", "gloo")
    assert (options.debug, options.max_grad_norm, options.precision) == (True, None, "fp32")
    assert options.overridden_args == set()
    assert parse("h.yaml", "--device=cuda:2")[1].device == "cuda:2"
    (tmp_path / "h.yaml").write_text("precision: fp8\n")
    with pytest.raises(ConfigError, match="got 'fp8' in the hparams YAML"):
        parse("h.yaml")


# ------------------------------------------------------------------------------------ the object


def test_items_attributes_and_keys_of_ones_own():
    options = RunOptions()
    options["debug"] = True
    options.noprogressbar = True
    options["mine"] = 3
    options.also_mine = 4
    assert (options.debug, options["noprogressbar"], options.mine, options["also_mine"]) == (
        True,
        True,
        3,
        4,
    )
    assert options.overridden_args == {"debug", "noprogressbar", "mine", "also_mine"}
    assert options.get("nothing", 5) == 5
    assert "device" in options
    assert "nothing" not in options
    assert not hasattr(options, "nothing")
    assert len(options) == len(list(options)) == len(options.keys()) == len(dict(**options))
    assert dict(options.items()) == options.as_dict()
    assert 3 in options.values()
    with pytest.raises(KeyError):
        options["nothing"]
    with pytest.raises(AttributeError, match="there is no run option 'precison'"):
        _ = options.precison


def test_deleting_brings_the_default_back():
    options = RunOptions(debug_batches=7, mine=1)
    del options["debug_batches"], options["mine"]
    assert options.debug_batches == 2
    assert "mine" not in options
    assert options.overridden_args == set()


def test_assignment_is_checked():
    options = RunOptions()
    with pytest.raises(ConfigError, match="precision expects one of .* got 'fp8' in run_opts"):
        options["precision"] = "fp8"
    with pytest.raises(
        ConfigError,
        match="grad_accumulation_factor expects a number >= 1, got 0 in run_opts",
    ):
        RunOptions(grad_accumulation_factor=0)
    with pytest.raises(ConfigError, match="debug expects true or false, got None in run_opts"):
        RunOptions(debug=None)


def test_from_dictionary_keeps_unknown_keys():
    options = RunOptions.from_dictionary({"device": "cpu", "rank": 3})
    assert options.overridden_args == {"device", "rank"}
    assert options.resolved()["rank"] == 3
    same = RunOptions.from_dictionary(options)
    assert same == options
    assert same is not options
    assert RunOptions(debug=True, overridden_args={"jit"}).overridden_args == {"debug", "jit"}


@pytest.mark.parametrize(
    "twin",
    [copy.copy, copy.deepcopy, RunOptions.copy, lambda o: pickle.loads(pickle.dumps(o))],
)
def test_copies(twin):
    options = RunOptions(debug=True, mine=[1])
    other = twin(options)
    assert other == options
    assert other.overridden_args == {"debug", "mine"}


def test_a_copy_is_apart():
    options = RunOptions()
    other = options.copy()
    other.debug = True
    other.tqdm_barcolor["train"] = "RED"
    assert (options.debug, options.overridden_args, options.tqdm_barcolor["train"]) == (
        False,
        set(),
        "GREEN",
    )
    assert RunOptions().tqdm_barcolor["train"] == "GREEN"


# ---------------------------------------------------------------------------------------- resolved


def test_precedence():
    options = RunOptions(debug_batches=5).resolved({"debug_batches": 6, "debug_epochs": 7})
    assert (options.debug_batches, options.debug_epochs, options.nonfinite_patience) == (5, 7, 3)
    assert options.overridden_args == {"debug_batches"}


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("grad_accumulation_factor", 4.0, 4),
        ("grad_accumulation_factor", np.int64(4), 4),
        ("grad_accumulation_factor", "4", 4),
        ("optimizer_step_limit", "1e5", 100000),
        ("max_grad_norm", 1, 1.0),
        ("max_grad_norm", -1, -1.0),
        ("max_grad_norm", None, None),
        ("max_grad_norm", np.float32(0.5), 0.5),
        ("ckpt_interval_minutes", 15, 15.0),
        ("debug", 1, True),
        ("debug", "no", False),
        ("debug", np.True_, True),
        ("jit_module_keys", "model", ["model"]),
        ("jit_module_keys", ("a", "b"), ["a", "b"]),
        ("tqdm_barcolor", {"train": "RED"}, {"train": "RED"}),
        ("device", torch.device("cpu"), "cpu"),
        ("log_config", None, None),
    ],
)
def test_yaml_values_are_typed(name, given, value):
    found = RunOptions().resolved({name: given})[name]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("precision", "fp8", "expects one of fp32, fp16, bf16"),
        ("grad_accumulation_factor", "three", "expects a whole number"),
        ("grad_accumulation_factor", 1.5, "expects a whole number"),
        ("grad_accumulation_factor", True, "expects a whole number"),
        ("grad_accumulation_factor", None, "expects a whole number"),
        ("grad_accumulation_factor", [1], "expects a whole number"),
        ("grad_accumulation_factor", float("inf"), "expects a whole number"),
        ("optimizer_step_limit", 0, "expects a number >= 1"),
        ("max_grad_norm", float("nan"), "expects a number"),
        ("debug", 2, "expects true or false"),
        ("debug", [], "expects true or false"),
        ("sync_batchnorm", "of", "expects on, off or auto"),
        ("tqdm_barcolor", "RED", "expects a mapping"),
        ("compile_mode", {}, "expects text"),
        ("jit_module_keys", 3, "expects a list of names"),
    ],
)
def test_yaml_values_are_checked(name, given, reason):
    with pytest.raises(ConfigError) as caught:
        RunOptions().resolved({name: given})
    assert f"{name} {reason}, got {given!r} in the hparams YAML" in str(caught.value)


def test_a_mode_of_the_compiler_that_torch_does_not_know_is_refused():
    """torch would tell it when it compiles, and the modules would train without."""
    with pytest.raises(
        ConfigError,
        match=r"^compile_mode expects one of default, "
        r"reduce-overhead, .*, got 'max' in",
    ):
        RunOptions().resolved({"compile_mode": "max"})
    from torch._inductor import list_mode_options

    for mode in list_mode_options():
        assert RunOptions().resolved({"compile_mode": mode}).compile_mode == mode


def test_intervals_are_checked_over_the_sources():
    with pytest.raises(ConfigError, match="--ckpt_interval_minutes=0"):
        RunOptions(ckpt_interval_steps=5).resolved({"ckpt_interval_minutes": 15})
    options = RunOptions(ckpt_interval_steps=5, ckpt_interval_minutes=0).resolved(
        {"ckpt_interval_minutes": 15}
    )
    assert (options.ckpt_interval_steps, options.ckpt_interval_minutes) == (5, 0.0)


@pytest.mark.parametrize(
    ("given", "hparams", "precision"),
    [
        ({"auto_mix_prec": True}, {}, "fp16"),
        ({"bfloat16_mix_prec": True}, {}, "bf16"),
        ({"bfloat16_mix_prec": True}, {"precision": "fp16"}, "bf16"),
        ({}, {"auto_mix_prec": True}, "fp16"),
        ({"precision": "fp32"}, {"auto_mix_prec": True}, "fp32"),
        ({"precision": "fp32", "auto_mix_prec": True}, {}, "fp32"),
        ({"auto_mix_prec": False}, {"precision": "bf16"}, "bf16"),
    ],
)
def test_old_precision_switches(given, hparams, precision, caplog):
    with caplog.at_level(logging.WARNING):
        options = RunOptions(**given).resolved(hparams).resolved(hparams)
    assert options.precision == precision
    used = [v for v in (*given.values(), *hparams.values()) if v is True]
    assert len([r for r in caplog.records if "is deprecated" in r.getMessage()]) == len(used)


@pytest.mark.parametrize(
    ("given", "hparams"),
    [({"jit": True}, {}), ({}, {"jit_module_keys": ["net"]})],
)
def test_torchscript_has_no_effect_and_says_so(given, hparams, caplog):
    RunOptions(**given).resolved(hparams)
    assert "--compile" in caplog.text


def test_old_precision_switch_on_the_command_line(caplog):
    assert parse("h.yaml", "--bfloat16_mix_prec")[1]["precision"] == "bf16"


def test_a_device_of_none_is_not_given(gpus):
    options = RunOptions(device=None, distributed_backend=None).resolved({"device": "cpu"})
    assert (options.device, options.distributed_backend) == ("cpu", "gloo")
    assert RunOptions(device="cuda").resolved({"device": "cpu"}).device == "cuda:0"


def test_what_the_yaml_set_at_parsing_stays_without_it(tmp_path):
    (tmp_path / "h.yaml").write_text("debug_batches: 9\n")
    assert parse("h.yaml")[1].resolved().debug_batches == 9


def test_resolving_does_not_change_the_original():
    options = RunOptions()
    options.resolved({"debug": True, "device": "cpu"})
    assert (options.debug, options.device) == (False, None)


def test_properties_read_and_write_the_run_options():
    @option_attributes
    class Host:
        def __init__(self):
            self.run_opts = RunOptions()

    host = Host()
    host.max_grad_norm = 3
    assert host.run_opts.max_grad_norm == 3.0
    host.run_opts["precision"] = "bf16"
    assert host.precision == "bf16"
    with pytest.raises(ConfigError):
        host.grad_accumulation_factor = 0


def test_the_line_of_given_options_leaves_out_defaults_that_override_nothing(caplog):
    caplog.set_level(logging.INFO)
    whole = RunOptions(device="cpu", debug=True).as_dict()
    RunOptions.from_dictionary({**whole, "mine": 3}).resolved({"precision": "bf16"})
    said = "Run options that were given: debug=True, device='cpu', precision='fp32', mine=3"
    assert said in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    "key",
    ["global_batchsize", "gradient_acumulation_factor", "grad_accumulation_facto"],
)
def test_a_key_with_nearly_the_name_of_an_option_is_warned_of(caplog, key):
    RunOptions(device="cpu").resolved({key: 3, "number_of_epochs": 2, "batch_size": 4})
    told = [
        record.getMessage()
        for record in caplog.records
        if "is not a run option" in record.getMessage()
    ]
    assert len(told) == (key != "gradient_acumulation_factor")
    assert all(repr(key) in text and "did you mean" in text for text in told)


def test_a_key_of_run_opts_is_looked_at_too(caplog):
    RunOptions.from_dictionary({"device": "cpu", "precison": "bf16"}).resolved()
    assert (
        "The key 'precison' is not a run option, and sets none; did you mean 'precision'?"
        in caplog.text
    )


def test_a_number_of_processes_in_the_yaml_comes_too_late(caplog, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    RunOptions(device="cpu").resolved({"nproc": 2})
    assert not any("nproc" in message for message in caplog.messages)  # started by something else
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name)
    RunOptions(device="cpu").resolved({"nproc": 2})
    told = "The YAML has nproc, which starts no processes: this one was there before it was read. "
    assert any(message.startswith(told) for message in caplog.messages)


def test_options_that_a_script_has_not_read_are_named(caplog, monkeypatch):
    words = ["train.py", "--nproc", "2", "--max_grad_norm=1", "--lr=0.3", "--precision", "bf16"]
    monkeypatch.setattr(sys, "argv", [*words, "--debug", "--local_rank=0"])
    RunOptions(device="cpu", debug=True).resolved({"precision": "bf16"})
    (told,) = [message for message in caplog.messages if "command line" in message]
    assert told.startswith("The command line has --nproc, --max_grad_norm, and the script has not")
    assert "run_opts={'nproc': ...}" in told


def test_what_a_script_has_read_is_not_named(caplog, monkeypatch, tmp_path):
    (tmp_path / "h.yaml").write_text("lr: 0.1\n")
    words = [str(tmp_path / "h.yaml"), "--device=cpu", "--max_grad_norm=1"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    parse_arguments()
    RunOptions(device="cpu").resolved({})  # of another Brain of the script
    assert not any("command line" in message for message in caplog.messages)


def test_keys_of_run_opts_that_are_no_option_are_named(caplog):
    """Each once, beside those of the recipe's own YAML, which are not named."""
    given = {"device": "cpu", "gradient_clipping": 1, "nproc": 2, "precison": "bf16", "jit": False}
    for _ in range(2):
        RunOptions.from_dictionary(given).resolved({"number_of_epochs": 2, "batch_size": 4})
    nearly, others = (message for message in caplog.messages if "run option" in message)
    assert nearly.startswith("The key 'precison' is not a run option, and sets none; did you mean")
    assert others == (
        "run_opts: no run option is named 'gradient_clipping', 'nproc'. ddpkit reads no such key; "
        "your own code may."
    )
