"""One run option: its name, its type, its default, and how a value of any source becomes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddpkit.errors import ConfigError
from ddpkit.options.values import to_bool, to_float, to_int, to_text, to_words
from ddpkit.strategies import problem_with

ON_COMMAND_LINE = "on the command line"
IN_RUN_OPTS = "in run_opts"
IN_YAML = "in the hparams YAML"

#: Moments of a run at which options are read for good.
MADE = "made"
WRAPPED = "wrapped"
PREPARED = "prepared"
IN_FIT = "in fit"
READING = "reading"  # the data of an epoch, in training

#: In the place of a value in measured slices: as in any run.
AS_GIVEN: Any = object()

_NOTHING = frozenset({"", "none", "null", "~", "auto"})


@dataclass(eq=False)
class Option:
    """One run option; of an object that has options as items, the attribute that reads it.

    Its name, its type and whether it may be None come from the line on which it stands, of
    :class:`~ddpkit.options.table.OptionTypes`.

    Args:
        default: its value if none is given.
        group: the heading of ``--help`` under which it stands; empty for what the command line does
            not take.
        help: one line.
        form: how its value is shown in ``--help``.
        choices: the values that are accepted; empty for any.
        minimum: the smallest number that makes sense.
        above: a bound that the number must exceed.
        shown: how ``--help`` says the default where the value itself would not tell.
        is_attribute: whether a Brain has an attribute of this name. What no recipe reads or sets
            needs none: a recipe's own attribute of the name then means what it likes. It is read at
            ``brain.run_opts``.
        needs: the options of which one must be given, and with this value, if it is to have an
            effect.
        fixed: the moment from which it cannot be changed, since it has been read; empty: it is read
            whenever it counts.
        changes_numbers: whether a resumed run warns where it was changed, as the run then has other
            numbers; None: as the others of its group, of which ``NUMBERS`` in the table has some.
        sets_speed: whether it decides how fast a step is: it is told with measured steps.
        in_slice: its value in a measured slice of a run, which goes on from nothing, saves and
            shows nothing, and measures each step, whatever is given; else that which is given.
        saves_activations: whether it makes the passes keep less for the gradients.
        bare: the value that it has without one, as ``--estimate``; empty: it needs one. It then
            takes a value after ``=`` alone, never the next word.

    Ranks: local.

    Example:
        >>> from ddpkit.options import OPTION_BY_NAME
        >>> OPTION_BY_NAME["debug_batches"].coerce("3", "here")
        3
    """

    default: Any
    group: str
    help: str
    form: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    shown: str = ""
    is_attribute: bool = True
    needs: str = ""
    fixed: str = ""
    changes_numbers: bool | None = None
    sets_speed: bool = False
    in_slice: Any = AS_GIVEN
    saves_activations: bool = False
    bare: str = ""

    def __set_name__(self, owner: type, name: str) -> None:
        annotation = owner.__annotations__[name]
        self.name: str = name
        self.type, self._convert, self._noun = _KINDS[
            annotation.removesuffix(" | None").partition("[")[0]
        ]
        self.is_optional = self.default is None or annotation.endswith(" | None")
        self.form = self.form or "|".join(self.choices)

    def __get__(self, owner: Any, _kind: type) -> Any:
        return self if owner is None else owner[self.name]

    def coerce(self, value: Any, where: str) -> Any:
        """Check a value from any source and bring it to this option's type.

        Args:
            value: text from a command line, or an object from a YAML file or from Python.
            where: the source in words, for the error.

        Returns:
            The value as ``type``, or None where that is allowed.

        Raises:
            ConfigError: the value cannot be used; the message says what to give instead.

        Ranks: local.
        """
        if self.is_optional and ("" if value is None else str(value)).strip().lower() in _NOTHING:
            return None
        try:
            converted = self._convert(value)
        except (TypeError, ValueError, OverflowError):
            noun = "on, off or auto" if self.type is bool and self.is_optional else self._noun
            raise self._error(value, where, noun) from None
        if self.type is object and (problem := problem_with(converted)):
            raise self._error(value, where, problem)
        self._require_choice(converted, value, where)
        if self.minimum is not None and converted < self.minimum:
            raise self._error(value, where, f"a number >= {self.minimum}")
        if self.above is not None and converted <= self.above:
            raise self._error(value, where, f"a number > {self.above:g}")
        return converted

    def _require_choice(self, converted: Any, value: Any, where: str) -> None:
        if not self.choices:
            return
        is_list = self.type is list
        if not set(converted if is_list else (converted,)) <= set(self.choices):
            kind = "some" if is_list else "one"
            raise self._error(value, where, f"{kind} of {', '.join(self.choices)}")

    @property
    def shown_default(self) -> str:
        """The default in words."""
        if self.shown or self.default is None:
            return self.shown or "none"
        return ("on" if self.default else "off") if self.type is bool else str(self.default)

    def _error(
        self,
        value: Any,
        where: str,
        expected: str,
    ) -> ConfigError:
        name, place = (
            (f"--{self.name}", "") if where == ON_COMMAND_LINE else (self.name, f" {where}")
        )
        meaning = f"{name}: {self.help} (default: {self.shown_default})."
        return ConfigError(f"{name} expects {expected}, got {value!r}{place}. {meaning}")


option: Any = Option  # for type checkers, a row is a value of the type that is written before it

_KINDS: dict[str, tuple[type, Any, str]] = {
    "bool": (bool, to_bool, "true or false"),
    "int": (int, to_int, "a whole number"),
    "float": (float, to_float, "a number"),
    "str": (str, to_text, "text"),
    "list": (list, to_words, "a list of names"),
    "dict": (dict, lambda value: {**value}, "a mapping"),
    "Any": (object, lambda value: value, "a name or an object"),  # of a strategy
}
