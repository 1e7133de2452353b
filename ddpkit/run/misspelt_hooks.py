"""Methods of a recipe that nothing calls, and whose names are nearly those of hooks."""

from __future__ import annotations

import difflib
import inspect

from ddpkit.logger import get_logger

logger = get_logger(__name__)


def warn_of_misspelt_hooks(recipe: type, base: type) -> None:
    """Warn of methods that nothing calls, with nearly the name of a hook that the recipe does not
    override.

    Args:
        recipe: the class of the Brain.
        base: the Brain, which has the hooks.

    Ranks: all; the main process speaks.
    """
    own, known = (dict(inspect.getmembers(kind, inspect.isfunction)) for kind in (recipe, base))
    hooks = [
        name for name, function in known.items() if own.get(name) is function and name[0] != "_"
    ]
    codes = [
        getattr(inspect.unwrap(function), "__code__", function.__code__)
        for function in own.values()
    ]
    for code in codes:
        # functions inside of it
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    called = {name for code in codes for name in code.co_names}
    for name in [
        name for name in own if not (name in called or name[0] == "_" or hasattr(base, name))
    ]:
        for meant in difflib.get_close_matches(name, hooks, n=1, cutoff=0.88):
            words = (
                "%s.%s is never called by ddpkit; did you mean %s? If the method is your own, all "
                "is well."
            )
            logger.warning_once(words, recipe.__name__, name, meant)
