"""Loading a recipe's YAML file, with a sentence for what is wrong in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ddpkit.control import usage_errors

__all__ = ["load_hparams"]


def load_hparams(
    hparams_file: str | os.PathLike[str],
    overrides: Mapping[str, Any] | str | None = None,
) -> dict[str, Any]:
    r"""Load a recipe's YAML file with HyperPyYAML; say in a sentence what is wrong in it.

    The result is that of ``hyperpyyaml.load_hyperpyyaml``. A mistake is told with the file, the
    line, the key, names that come close, and what to do: a class that is not there or cannot be
    imported, an argument that it does not take, an exception in it (with the line of your own
    code), a reference to nothing, a key twice, broken YAML.

    The file is loaded once: what it calls is never called again to find a mistake.

    Args:
        hparams_file: path of the YAML file. It is code: it can call anything.
        overrides: values that replace some of the file's: the YAML text that
            :func:`ddpkit.run_opts.parse_arguments` returns, or a mapping. Each key must be in the
            file.

    Returns:
        The values by key, without those whose key begins with ``__``.

    Raises:
        MissingFileError: there is no such file.
        ConfigError: the file, or what it names, cannot be loaded; the exception behind it is its
            ``__cause__``.

    An error that nobody catches ends the process with exit code 2 and one sentence,
    ``train.py: error: ...``, which the first rank of a machine says.

    Ranks: local; each rank loads the file.

    State: what the file constructs and calls; ``sys.excepthook`` after an error.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = f"{folder}/hparams.yaml"
        ...     with open(file, "w") as opened:
        ...         _ = opened.write("size: 2\nnet: !new:torch.nn.Linear [!ref <size>, 1]\n")
        ...     load_hparams(file, "size: 3")["net"]
        Linear(in_features=3, out_features=1, bias=True)
    """
    # loads HyperPyYAML: not for the name alone
    from ddpkit.recipe_yaml import construct, with_scratch_output

    file = os.fspath(hparams_file)
    with usage_errors():
        return construct(file, with_scratch_output(file, overrides))
