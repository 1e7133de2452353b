"""YAML that holds plain values and tensors, and that executes nothing when it is read.

PyYAML keeps the tables that say what a tag does on its loader classes, and other code changes them:
after ``load_hyperpyyaml(..., loader=yaml.SafeLoader)`` any ``yaml.safe_load`` of the process
executes what a file names. The loader and the dumper here have tables of their own.

Source: the registration of tags is described at https://pyyaml.org/wiki/PyYAMLDocumentation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import yaml
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

from ddpkit.errors import CheckpointError
from ddpkit.logger import get_logger

if TYPE_CHECKING:
    from yaml import SafeDumper
else:
    # four times as fast, where libyaml is there
    SafeDumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

logger = get_logger(__name__)


@dataclass(frozen=True)
class UnreadableValue:
    """Stands for a value that could only be read by executing something named in the file.

    Attributes:
        tag: the YAML tag of the value.

    Example:
        >>> load_plain_yaml("a: !!python/object/apply:os.getcwd []")["a"].tag
        'tag:yaml.org,2002:python/object/apply:os.getcwd'
    """

    tag: str


def to_plain(value: Any) -> Any:
    """Turn a value into what :func:`dump_plain_yaml` can write and any later version can read.

    Args:
        value: numbers, strings, containers; NumPy's become Python's, tensors stay tensors, tuples
            and sets become lists, paths become strings. Anything else becomes its ``str``, with a
            warning.

    Returns:
        A copy made of plain types and tensors.

    Example:
        >>> to_plain({"loss": np.float64(0.5), "shape": (1, 2), "file": PurePosixPath("a/b")})
        {'loss': 0.5, 'shape': [1, 2], 'file': 'a/b'}
    """
    if value is None or type(value) in {bool, int, float, bytes}:
        return value
    for kinds, convert in _CONVERTERS:
        if isinstance(value, kinds):
            return convert(value)
    kind = type(value).__name__
    logger.warning("%r (a %s) cannot be stored in YAML; its text is stored instead.", value, kind)
    return str(value)


def _plain_key(key: Any) -> Any:
    plain = to_plain(key)
    return str(key) if isinstance(plain, (list, dict, torch.Tensor)) else plain


def _plain_scalar(value: np.generic) -> Any:
    item = value.item()
    return float(value) if isinstance(item, np.longdouble) else to_plain(item)


_CONVERTERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    # half characters, of file names
    (str, lambda value: str.encode(value, errors="backslashreplace").decode()),
    (
        torch.Tensor,
        lambda value: str(value) if value.is_complex() else value.detach().to("cpu", copy=True),
    ),
    (np.generic, _plain_scalar),
    (np.ndarray, lambda value: to_plain(value.tolist())),
    (Mapping, lambda value: {_plain_key(key): to_plain(content) for key, content in value.items()}),
    ((list, tuple, set, frozenset), lambda value: [to_plain(item) for item in value]),
    (os.PathLike, os.fspath),
    (date, lambda value: value),
    (int, int),
    (float, float),
)


class _PlainDumper(SafeDumper):
    """A dumper of its own: other dumpers still refuse tensors."""

    def ignore_aliases(self, _data: Any) -> bool:
        """Write a value that stands in two places twice."""
        return True


def _represent_tensor(dumper: _PlainDumper, value: torch.Tensor) -> yaml.Node:
    values = (value.double() if value.is_floating_point() else value).flatten().tolist()
    content = {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "values": values,
    }
    return dumper.represent_mapping("!tensor", content, flow_style=True)


_PlainDumper.add_multi_representer(torch.Tensor, _represent_tensor)


def dump_plain_yaml(value: Any) -> str:
    r"""Write a value as YAML, after :func:`to_plain`.

    Args:
        value: see :func:`to_plain`.

    Returns:
        YAML text. Only tensors have a tag (``!tensor``) that other readers do not know.

    Example:
        >>> dump_plain_yaml({"epoch": 3, "losses": [0.5, float("nan")]})
        'epoch: 3\nlosses: [0.5, .nan]\n'
    """
    text: str = yaml.dump(
        to_plain(value),
        Dumper=_PlainDumper,
        default_flow_style=None,
        sort_keys=False,
        allow_unicode=True,
        width=1 << 30,
    )
    # a line that ends a lone value
    return text.removesuffix("...\n") if text.endswith("\n...\n") else text


# What PyYAML's constructors raise over values that say one thing and hold another.
_NOT_YAML = (
    yaml.YAMLError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def load_plain_yaml(text: str) -> Any:
    """Read YAML without executing anything, whatever it says and whatever was done to
    ``yaml.SafeLoader``.

    Args:
        text: YAML. Values that older libraries wrote with Python tags (tuples, NumPy numbers,
            paths) are understood; other tagged values come back as :class:`UnreadableValue`.

    Returns:
        Plain containers, numbers, strings, dates and tensors.

    Raises:
        CheckpointError: the text is not valid YAML; the message has line and reason. The caller
            adds the file.

    Ranks: local.

    Example:
        >>> load_plain_yaml(dump_plain_yaml({"w": torch.tensor([1.0, 2.0])}))
        {'w': tensor([1., 2.])}
    """
    try:
        return yaml.load(text, Loader=_PlainLoader)  # noqa: S506 -- runs nothing
    except _NOT_YAML as error:
        raise CheckpointError(f"invalid YAML: {' '.join(str(error).split())}") from error


class _PlainLoader(yaml.SafeLoader):
    """A loader with tables of its own: what is registered on ``yaml.SafeLoader`` does not reach it,
    nor the reverse.
    """

    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        tag: function
        for tag, function in SafeConstructor.yaml_constructors.items()
        if tag is not None and tag.startswith("tag:yaml.org,2002:")
    }
    yaml_multi_constructors: ClassVar[dict[str | None, Any]] = {}
    yaml_implicit_resolvers = Resolver.yaml_implicit_resolvers
    yaml_path_resolvers = Resolver.yaml_path_resolvers


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def _construct_tensor(loader: _PlainLoader, node: yaml.Node) -> torch.Tensor:
    content = loader.construct_mapping(node, deep=True)  # type: ignore[arg-type]
    return torch.tensor(content["values"], dtype=_DTYPES[str(content["dtype"])]).reshape(
        content["shape"]
    )


def _construct_dtype(loader: _PlainLoader, node: yaml.Node) -> Any:
    """Read the dtype of a NumPy number: a kind and a size, such as ``f8``, never the name of an
    object.
    """
    content = loader.construct_mapping(node, deep=True)  # type: ignore[arg-type]
    state = content.get("state", ["", ""])
    code = str(content.get("args", [""])[0])
    order = str(state[1])
    if not re.fullmatch(r"[biuf]\d{1,2}", code) or order not in {"<", ">", "|", "="}:
        return UnreadableValue(node.tag)
    return np.dtype(order + code)


def _construct_scalar(loader: _PlainLoader, node: yaml.Node) -> Any:
    dtype, raw = loader.construct_sequence(node, deep=True)  # type: ignore[arg-type]
    if not isinstance(dtype, np.dtype) or not isinstance(raw, bytes):
        return UnreadableValue(node.tag)
    return _plain_scalar(np.frombuffer(raw, dtype=dtype, count=1)[0])


def _construct_path(loader: _PlainLoader, node: yaml.Node) -> str:
    return str(PurePosixPath(*loader.construct_sequence(node, deep=True)))  # type: ignore[arg-type]


_PYTHON = "tag:yaml.org,2002:python/"
_LEGACY: dict[str, Any] = {
    "!tensor": _construct_tensor,
    f"{_PYTHON}tuple": lambda loader, node: tuple(loader.construct_sequence(node, deep=True)),
    f"{_PYTHON}object/apply:numpy.dtype": _construct_dtype,
    f"{_PYTHON}object/apply:numpy.core.multiarray.scalar": _construct_scalar,
    f"{_PYTHON}object/apply:numpy._core.multiarray.scalar": _construct_scalar,
    f"{_PYTHON}object/apply:pathlib.PosixPath": _construct_path,
    f"{_PYTHON}object/apply:pathlib._local.PosixPath": _construct_path,
}
for _tag, _constructor in _LEGACY.items():
    _PlainLoader.add_constructor(_tag, _constructor)
_PlainLoader.add_constructor(None, lambda _loader, node: UnreadableValue(node.tag))
