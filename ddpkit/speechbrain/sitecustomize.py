"""Read by Python itself when it starts, where this folder is in ``PYTHONPATH``: answers SpeechBrain
in child processes.

That covers loader workers and ranks that are spawned, and torchrun or any other Python that a
recipe starts.

Source: https://docs.python.org/3/library/site.html .
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _begin() -> None:
    folder = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if not path or Path(path).resolve() != folder]
    _run_hidden()
    if os.environ.get("DDPKIT_SPEECHBRAIN", "") not in {"", "0"}:
        try:
            import ddpkit.speechbrain  # noqa: F401 -- it is imported for what that does
        except ModuleNotFoundError as error:
            if error.name != "ddpkit":  # in another environment, which has none
                raise


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    _begin()
