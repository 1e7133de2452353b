"""Overrides of a recipe's YAML keys: what a wrong name may have meant, and values of another
kind.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ddpkit.errors import ConfigError

__all__ = ["close_names", "nested_override", "require_same_kind"]

_YAML_TAG = "tag:yaml.org,2002:"
_MOST_NAMES = 3
_NUMBERS = {f"{_YAML_TAG}int": "a whole number", f"{_YAML_TAG}float": "a number"}

#: Names for one thing, by which other libraries and recipes call it. Any of a row may be meant by
#: any other.
SYNONYMS = (
    "lr learning_rate initial_lr base_lr init_lr lr_init max_lr",
    (
        "batch_size bs batchsize batch train_batch_size per_device_train_batch_size "
        "micro_batch_size_per_gpu"
    ),
    "global_batch_size total_batch_size effective_batch_size train_batch_size",
    (
        "number_of_epochs epochs epoch num_epochs n_epochs nb_epochs max_epochs total_epochs "
        "num_train_epochs"
    ),
    "optimizer_step_limit max_steps num_steps total_steps max_train_steps max_iters steps",
    (
        "grad_accumulation_factor gradient_accumulation_steps grad_accum accumulate_grad_batches "
        "accum_iter update_freq"
    ),
    (
        "max_grad_norm clip clip_grad grad_clip clip_norm clip_grad_norm gradient_clip_val "
        "gradient_clipping"
    ),
    "precision amp fp16 bf16 half dtype mixed_precision auto_mix_prec",
    (
        "nproc gpus gpu_count n_gpu n_gpus ngpus num_gpus devices world_size num_processes "
        "nproc_per_node nprocs"
    ),
    "device gpu cuda cpu accelerator use_cuda no_cuda use_gpu",
    (
        "resume resume_from resume_from_checkpoint checkpoint ckpt ckpt_path checkpoint_path load "
        "load_from restore"
    ),
    (
        "output_folder output_dir output out_dir save_dir save_folder results log_dir logdir "
        "work_dir exp_dir"
    ),
    "data_folder data_dir data_path data_root data root dataset_path",
    "num_workers workers n_workers n_worker dataloader_num_workers",
    "seed random_seed manual_seed rng_seed",
    "test_only eval eval_only evaluate evaluate_only test",
    "compile torch_compile",
    "debug fast_dev_run dry_run smoke_test",
    "weight_decay wd l2",
    "noprogressbar no_progress_bar progress_bar progress quiet disable_tqdm",
    "activation_checkpointing gradient_checkpointing grad_checkpoint grad_checkpointing",
    "ema_decay ema use_ema model_ema",
    "sync_batchnorm sync_bn syncbn",
    "time_limit max_time timeout walltime",
    "strategy fsdp zero zero1 deepspeed",
    "ckpt_interval_minutes save_interval save_every checkpoint_interval",
    "ckpt_interval_steps save_steps save_every checkpoint_every",
)


def close_names(
    name: str,
    keys: Iterable[str],
    options: Iterable[str],
) -> list[str]:
    """Find what a name that is neither a key nor an option may have meant, the likeliest first.

    Args:
        name: without its dashes.
        keys: of the recipe's YAML.
        options: of ddpkit.

    Returns:
        At most three names, none twice.

    Ranks: local.

    Example:
        >>> (
        ...     close_names("learning_rate", ["lr", "seed"], ["debug"]),
        ...     close_names("batch-size", ["batch_size"], []),
        ... )
        (['lr'], ['batch_size'])
    """
    own = list(keys)
    known = list(dict.fromkeys([*keys, *options]))
    plain = _plain(name)
    same = [option for option in known if _plain(option) in {plain, plain.removeprefix("no_")}]
    if same:
        return same[:_MOST_NAMES]
    rows = [row.split() for row in SYNONYMS if plain in row.split()]
    meant = [option for row in rows for option in known if _plain(option) in row]
    if meant:
        return list(dict.fromkeys(meant))[:_MOST_NAMES]
    longer = [name for name in own if plain in _plain(name)]
    by_plain = {_plain(name): name for name in reversed(known)}
    found = longer or [by_plain[name] for name in difflib.get_close_matches(plain, by_plain)]
    return found[:_MOST_NAMES]


def _plain(name: str) -> str:
    return name.replace("-", "_").lower()


def nested_override(
    name: str,
    value: str | None,
    nodes: Mapping[str, Node],
) -> str | None:
    """Say how a key inside of another is overridden, where ``--outer.inner=value`` was given; else
    return None.

    Args:
        name: such as ``"outer.inner"``.
        value: what was given.
        nodes: the values of the YAML by key.

    Ranks: local.

    Example:
        >>> nested_override("opt.lr", "0.1", {"opt": ScalarNode("", "")})
        "--opt='{lr: 0.1}'"
    """
    outer, *inner = name.split(".")
    if not inner or not all(inner) or outer not in nodes:
        return None
    text = "..." if value is None else value
    for key in reversed(inner):
        text = f"{{{key}: {text}}}"
    return f"--{outer}='{text}'"


def require_same_kind(
    key: str,
    value: str,
    node: Node,
    param_file: str,
) -> None:
    """Refuse text in the place of a number, a switch, a list or a mapping, and nothing in the place
    of anything.

    A reference, a tag, ``null`` and a text in quotes of its own are taken as they are.

    Args:
        key: of the YAML.
        value: the text from the command line.
        node: the value in the YAML.
        param_file: path of the YAML, for the message.

    Raises:
        ConfigError: the value is empty, or of another kind.

    Ranks: local.

    Example:
        >>> number = ScalarNode("tag:yaml.org,2002:float", "0.1")
        >>> require_same_kind("lr", "abc", number, "hparams.yaml")
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: --lr='abc' is a text, and hparams.yaml has a number there, 0.1:
        ...
    """
    if not value.strip():
        raise ConfigError(
            f"--{key}= has no value: give one, --{key}=null for none, or --{key}='\"\"' for an "
            "empty text."
        )
    if not _is_plain_text(value):
        return
    expected = _expected(node)
    if expected is None:
        return
    kind, remedy = expected
    hint = f"None is written --{key}=null. " if value.lower() in {"none", "nil", "nothing"} else ""
    raise ConfigError(
        f"--{key}={value!r} is a text, and {param_file} has {kind} there{_shown(node)}: give "
        f"{remedy}. {hint}A text that is meant so needs quotes of its own, --{key}='\"{value}\"'."
    )


def _expected(node: Node) -> tuple[str, str] | None:
    """Return the kind of a value in the YAML, and what to give; None where a text is as good."""
    tag = str(node.tag)
    if not tag.startswith(_YAML_TAG):
        return None
    if tag in _NUMBERS:
        return _NUMBERS[tag], _NUMBERS[tag]
    if tag == f"{_YAML_TAG}bool":
        return "a switch", "true or false"
    if isinstance(node, SequenceNode):
        return "a list", "a list, such as [a, b]"
    if isinstance(node, MappingNode):
        return "a mapping", "the keys that change, such as {key: value}"
    return None


def _shown(node: Node) -> str:
    return f", {node.value}" if isinstance(node, ScalarNode) else ""


def _is_plain_text(value: str) -> bool:
    """Say whether YAML reads a value as text, without quotes that say so."""
    try:
        node = YAML(typ="safe", pure=True).compose(value)
    except (YAMLError, ValueError):
        return value.lstrip()[:1] not in {
            "[",
            "{",
        }  # a bracket that is not closed is told by its own words
    return (
        isinstance(node, ScalarNode)
        and node.tag == f"{_YAML_TAG}str"
        and node.style not in {"'", '"'}
    )
