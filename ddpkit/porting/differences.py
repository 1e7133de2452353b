"""What behaves differently under ddpkit in a recipe, as far as its source shows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import yaml

from ddpkit.porting.source_code import Note, dotted

__all__ = ["DIFFERENCES", "difference", "python_differences", "yaml_differences"]

_OWN = "how-to/own-fit-batch.md"

#: For each difference: what is told, and the page under ``docs/`` or the heading of
#: ``docs/porting.md`` that says more.
DIFFERENCES = {
    "accumulation": ("the short last window of an epoch is stepped, too", "#gradients-and-steps"),
    "backward": (
        "goes past self.backward(loss), which weighs a loss and knows when to average",
        _OWN,
    ),
    "divided sampler": (
        ("repeats samples to be even: give fit the sampler inside, which repeats none"),
        "#samplers",
    ),
    "factor": (
        ("divides by grad_accumulation_factor: self.backward(loss) does, with the right weights"),
        _OWN,
    ),
    "fit_batch": ("overrides fit_batch: use self.backward(loss) and self.should_step", _OWN),
    "in order": (
        ("says no `shuffle`: in order on any number of processes, unless the script has a sampler"),
        "#data",
    ),
    "make_dataloader": (
        ("overrides make_dataloader: the loader that it returns for training is divided"),
        "#data",
    ),
    "masked mean": (
        "takes lengths: of a mean over frames or tokens return (loss_sum, count)",
        "#gradients-and-steps",
    ),
    "not called": ("is not called any more", "#methods-of-the-brain"),
    "own step": (
        "steps an optimizer by itself: nothing is clipped, and no step is skipped",
        "#limits-worth-knowing",
    ),
    "pretrainer": (
        "Pretrainer takes files on disk: it downloads nothing from a hub or a page",
        "#checkpoints",
    ),
    "seed": ("the order of samples follows seed_everything, not torch.manual_seed", "#samplers"),
    "window": (
        "counts windows by itself: self.should_step is right in a short last one, too",
        _OWN,
    ),
}

_NOT_CALLED = ("_train_loader_specifics", "_save_intra_epoch_ckpt", "_should_save_intra_epoch_ckpt")
_METHODS = {
    "fit_batch": "fit_batch",
    "make_dataloader": "make_dataloader",
    **dict.fromkeys(_NOT_CALLED, "not called"),
}
_CLASSES = {"DistributedSamplerWrapper": "divided sampler", "Pretrainer": "pretrainer"}
_HOOKS = {"compute_forward", "compute_objectives", "fit_batch"}
_LOSS = re.compile(r"loss|cost|nll|criterion|objective")
_NO_MEAN_OVER_TIME = re.compile(r"ctc|transducer|rnnt")  # a mean over samples
_LENGTHS = re.compile(r"(?:^|_)(?:len|lens|length|lengths|mask|masks)$")
_ORDERS = {"shuffle", "sampler", "batch_sampler"}
_EVALUATION = re.compile(r"valid|dev|test|eval")

Found = Iterator[tuple[int, str]]


def python_differences(tree: ast.Module) -> list[Note]:
    r"""Find what a script does that ddpkit does in another way.

    Args:
        tree: the script.

    Returns:
        What to tell, by line.

    Example:
        >>> [note] = python_differences(
        ...     ast.parse("class A(sb.Brain):\n    def fit_batch(self, batch): ...")
        ... )
        >>> note.lines, note.link
        ((2,), 'docs/how-to/own-fit-batch.md')
    """
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    known = [node for node in calls if _CLASSES.get(_last(node.func))]
    found = {(node.lineno, _CLASSES[_last(node.func)]) for node in known}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and _is_brain(node):
            found |= {*_in_class(node), *_in_code(node)}
    return _notes(found)


def _notes(found: Iterable[tuple[int, str]]) -> list[Note]:
    lines: dict[str, list[int]] = {}
    for line, kind in sorted(found):
        lines.setdefault(kind, []).append(line)
    return [difference(kind, numbers) for kind, numbers in lines.items()]


def difference(kind: str, lines: Iterable[int]) -> Note:
    """Say what behaves differently in some lines.

    Args:
        kind: a key of ``DIFFERENCES``.
        lines: their numbers.

    Returns:
        What to tell.
    """
    text, page = DIFFERENCES[kind]
    return Note(
        tuple(lines),
        text,
        f"docs/porting.md{page}" if page.startswith("#") else f"docs/{page}",
    )


def _last(node: ast.AST) -> str:
    """The last part of the name of what is called."""
    return node.attr if isinstance(node, ast.Attribute) else dotted(node)


def _is_brain(node: ast.ClassDef) -> bool:
    methods = {method.name for method in node.body if isinstance(method, ast.FunctionDef)}
    return bool(methods & _HOOKS) or any(_last(base).endswith("Brain") for base in node.bases)


def _in_class(brain: ast.ClassDef) -> Found:
    for node in brain.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        if node.name in _METHODS:
            yield node.lineno, _METHODS[node.name]
        returned = [
            statement
            for statement in ast.walk(node)
            if isinstance(statement, ast.Return) and statement.value is not None
        ]
        if node.name == "compute_objectives" and not any(
            isinstance(statement.value, ast.Tuple) for statement in returned
        ):
            calls = (call for call in ast.walk(node) if isinstance(call, ast.Call))
            yield from ((call.lineno, "masked mean") for call in calls if _is_masked_mean(call))


def _is_masked_mean(node: ast.Call) -> bool:
    name = _last(node.func).lower()
    if not _LOSS.search(name) or _NO_MEAN_OVER_TIME.search(name):
        return False
    given = [_last(argument) for argument in node.args] + [word.arg or "" for word in node.keywords]
    return any(_LENGTHS.search(name) for name in given)


def _in_code(brain: ast.ClassDef) -> Found:
    for node in ast.walk(brain):
        if isinstance(node, (ast.BinOp, ast.AugAssign)):
            factor = node.right if isinstance(node, ast.BinOp) else node.value
            if _last(factor) == "grad_accumulation_factor":
                kind = {ast.Div: "factor", ast.Mod: "window"}.get(type(node.op))
                yield from [(node.lineno, kind)] if kind else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            stepped = [owner, *map(ast.unparse, node.args[:1])]
            if node.func.attr == "backward" and owner != "self":
                yield node.end_lineno or node.lineno, "backward"
            elif node.func.attr == "step" and any("optim" in name for name in stepped):
                yield node.lineno, "own step"


def yaml_differences(text: str) -> list[Note]:
    """Find what a YAML file says that ddpkit takes in another way.

    Args:
        text: the file.

    Returns:
        What to tell, by line.

    Raises:
        yaml.YAMLError: the text is not YAML.

    Example:
        >>> [note] = yaml_differences("grad_accumulation_factor: 4")
        >>> note.text
        'the short last window of an epoch is stepped, too'
    """
    document = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(document, yaml.MappingNode):
        return []
    pairs = document.value
    entries = [(str(key.value), key.start_mark.line + 1, value) for key, value in pairs]
    found = {(line, kind) for key, line, value in entries for kind in _of_entry(key, value, text)}
    if any(key == "sorting" for key, _, _ in entries):
        found = {(line, kind) for line, kind in found if kind != "in order"}
    return _notes(found)


def _of_entry(key: str, value: yaml.Node, text: str) -> Iterator[str]:
    plain = value.value if isinstance(value, yaml.ScalarNode) else ""
    if key == "grad_accumulation_factor" and plain not in {"", "1"}:
        yield "accumulation"
    last = value.tag.rpartition(".")[2]
    if last in _CLASSES:
        yield _CLASSES[last]
    if value.tag.endswith("apply:torch.manual_seed") and "seed_everything" not in text:
        yield "seed"
    inner = (
        {str(key.value) for key, _ in value.value} if isinstance(value, yaml.MappingNode) else set()
    )
    if (
        "loader" in key
        and not _EVALUATION.search(key)
        and "batch_size" in inner
        and not inner & _ORDERS
    ):
        yield "in order"
