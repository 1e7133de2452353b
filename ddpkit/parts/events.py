"""Who hears what: the parts of one run, their order, and the calls of their events."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from ddpkit.base import note_part
from ddpkit.errors import ConfigError
from ddpkit.parts.part import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ddpkit.types import Stage

EVENTS = (
    "check",
    "around_fit",
    "start_rows",
    "on_sizes_known",
    "on_optimizers_made",
    "on_fit_start",
    "on_stage_start",
    "wrap_batches",
    "on_gradients",
    "on_step_counted",
    "after_step",
    "is_validation_due",
    "on_sync",
    "on_out_of_memory",
    "on_stage_end",
    "on_fit_end",
    "state_dict",
    "load_state_dict",
)
NO_PART = (
    "parts={!r}: {!r} is no part. A part is an object of a subclass of ddpkit.Part, in the YAML "
    "such as !new:ddpkit.parts.EarlyStopping."
)
A_CLASS = "parts: {} is a class. Make an object of it; in the YAML with !new: and not with !name:."
SAME_NAME = (
    "parts: two parts have the name {!r}. Give one of them another `name`: its state stands under "
    "it in checkpoints."
)
HALF_SAVED = (
    "parts: {} has one of state_dict and load_state_dict. A run that goes on needs both: one "
    "returns what a checkpoint holds, the other takes it over."
)
NO_ANSWER = (
    "{}.is_validation_due returned {!r}. Return True or False, how many batches to validate on, or "
    "None where the part has no say."
)
NO_CONTEXT = (
    "{} returned {!r}, which is no context. Return what `with` takes, such as the result of a "
    "function with @contextlib.contextmanager."
)
NO_ROWS = (
    "{}.start_rows returned {!r}. Return a dict of a word or two and a sentence, such as "
    "{{'stops': 'after 3 epochs'}}; an empty one for no row."
)
NEEDS = "parts: {} needs {} before it in the list, and the list is {}."


class PartEvents:
    """The parts of a run, and who of them hears which event.

    Args:
        parts: in the order in which they hear an event.

    Attributes:
        parts: as given.

    Raises:
        ConfigError: something is no part, two have one name, or one needs another before it.

    Ranks: as the events.

    Example:
        >>> class Heartbeat(Part):
        ...     def on_sync(self, brain):
        ...         print("alive")
        >>> events = PartEvents([Heartbeat()])
        >>> events.hears("on_sync"), events.hears("after_step")
        (True, False)
        >>> events.tell("on_sync", None)
        alive
    """

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        self.parts = tuple(parts)
        _check(self.parts)
        self._listen(self.parts)

    def _listen(self, parts: Sequence[Part]) -> None:
        self._hearing = {
            event: [part for part in parts if _overrides(part, event)] for event in EVENTS
        }

    @contextlib.contextmanager
    def with_own(self, own: Sequence[Part]) -> Iterator[None]:
        """Return a context in which parts of the library hear each event after those that were
        given.

        Args:
            own: in their order.
        """
        self._listen((*self.parts, *own))
        try:
            yield
        finally:
            self._listen(self.parts)

    def hears(self, event: str) -> bool:
        """Say whether any part hears an event."""
        return bool(self._hearing[event])

    def listeners(self, event: str) -> str:
        """Return the names of the parts that hear an event, in words."""
        return ", ".join(part.name for part in self._hearing[event])

    def saved(self) -> Mapping[str, Part]:
        """Return the parts whose state is saved, by name."""
        return {part.name: part for part in self._hearing["state_dict"]}

    def weight_average(self) -> Any:
        """Return the average of the weights that the first part with one keeps; or None."""
        kept = (part.weight_average for part in self.parts)
        return next((average for average in kept if average is not None), None)

    def tell(self, event: str, *values: Any) -> None:
        """Call an event of all parts that hear it.

        Args:
            event: its name.
            *values: its arguments.
        """
        for part in self._hearing[event]:
            with _naming(part, event):
                getattr(part, event)(*values)

    @contextlib.contextmanager
    def around_fit(self, brain: Any) -> Iterator[None]:
        """Return a context that is inside of those of all parts, the first part's outermost.

        Args:
            brain: of the recipe.

        Raises:
            ConfigError: a part has returned no context.
        """
        with contextlib.ExitStack() as entered:
            for part in self._hearing["around_fit"]:
                name = f"{part.name}.around_fit"
                with _naming(part, "around_fit"):
                    context = part.around_fit(brain)
                    if not isinstance(context, contextlib.AbstractContextManager):
                        raise ConfigError(NO_CONTEXT.format(name, context))
                    context.__enter__()
                entered.push(_leaving(context, name))
            yield

    def bound(self, event: str, brain: Any) -> Callable[[], None] | None:
        """Return a call of an event that comes in each step; None if no part hears it.

        Args:
            event: its name.
            brain: of the recipe.
        """
        calls = [(getattr(part, event), f"{part.name}.{event}") for part in self._hearing[event]]
        if not calls:
            return None

        # A try that nothing is raised in costs nothing, where a context costs a call in each step.
        def call_all() -> None:
            for hear, name in calls:
                try:
                    hear(brain)
                except BaseException as error:
                    note_part(error, name)
                    raise

        return call_all

    def validation_size(self, brain: Any, moment: str) -> float | None:
        """Return how many batches of each set ``fit`` validates on now.

        Args:
            brain: of the recipe.
            moment: ``"start"``, ``"step"`` or ``"epoch"``.

        Returns:
            The largest that a part asks for, infinity for all; 0: no validation; None: no part has
            a say.

        Raises:
            ConfigError: the answer of a part is none.
        """
        found = None
        for part in self._hearing["is_validation_due"]:
            with _naming(part, "is_validation_due"):
                size = _size(part, part.is_validation_due(brain, moment))
            if size is not None:
                found = size if found is None else max(found, size)
        return found

    def wrapped(self, brain: Any, batches: Iterable[Any], stage: Stage) -> Iterable[Any]:
        """Return the batches of a stage as the parts pass them on, the first part innermost.

        Args:
            brain: of the recipe.
            batches: of this rank.
            stage: TRAIN, VALID or TEST.

        Raises:
            ConfigError: a part has returned nothing to iterate over.
        """
        for part in self._hearing["wrap_batches"]:
            given = _Below(batches)
            with _naming(part, "wrap_batches"):
                wrapped = part.wrap_batches(brain, given, stage)
            if not hasattr(wrapped, "__iter__"):
                raise ConfigError(
                    f"{part.name}.wrap_batches returned {wrapped!r}, which yields no batches. "
                    "Return `batches`, or a generator that yields as many."
                )
            if wrapped is not given:
                batches = given.above(wrapped, f"{part.name}.wrap_batches")
        return batches

    def rows(self, brain: Any) -> dict[str, str]:
        """Return the rows of the start-up block: the parts in their order, and what they say.

        Args:
            brain: of the recipe.
        """
        found = {"parts": ", ".join(part.name for part in self.parts)}
        for part in self._hearing["start_rows"]:
            with _naming(part, "start_rows"):
                rows = part.start_rows(brain)
                if not isinstance(rows, Mapping):
                    raise ConfigError(NO_ROWS.format(part.name, rows))
                found |= {str(name): str(row) for name, row in rows.items()}
        return found


def parts_of(hparams: Any, given: Iterable[Part] | None) -> list[Part]:
    """Return the parts of a run: those of the YAML's ``parts``, then those given to the Brain.

    A key ``parts`` without any part in it is the recipe's own.

    Args:
        hparams: a mapping, or None.
        given: to the Brain; None: none.

    Raises:
        ConfigError: what was given cannot be listed.

    Ranks: local.

    Example:
        >>> parts_of({"parts": ["verb", "noun"]}, None)
        []
    """
    found = (hparams or {}).get("parts")
    in_yaml = list(found) if isinstance(found, (list, tuple)) else []
    if isinstance(found, Part):
        in_yaml = [found]
    if not any(isinstance(value, Part) or _is_part_class(value) for value in in_yaml):
        in_yaml = []
    try:
        own = list(given or ())
    except TypeError:
        raise ConfigError(
            f"parts={given!r} is no list. Give a list of parts, such as parts=[EarlyStopping()]."
        ) from None
    return [*in_yaml, *(part for part in own if all(part is not other for other in in_yaml))]


def _is_part_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Part)


def _overrides(part: Part, event: str) -> bool:
    return getattr(type(part), event) is not getattr(Part, event) or event in vars(part)


def _size(part: Part, answer: Any) -> float | None:
    """Return the batches that an answer of ``is_validation_due`` asks for."""
    if answer is None:
        return None
    if isinstance(answer, (bool, np.bool_)):
        return math.inf if answer else 0.0
    if isinstance(answer, Integral) and int(answer) >= 0:
        return float(int(answer))
    raise ConfigError(NO_ANSWER.format(part.name, answer))


def _check(parts: tuple[Any, ...]) -> None:
    names: set[str] = set()
    for number, part in enumerate(parts):
        if _is_part_class(part):
            raise ConfigError(A_CLASS.format(part.__name__))
        if not isinstance(part, Part):
            raise ConfigError(NO_PART.format(list(parts), part))
        if part.name in names:
            raise ConfigError(SAME_NAME.format(part.name))
        names.add(part.name)
        if _overrides(part, "state_dict") != _overrides(part, "load_state_dict"):
            raise ConfigError(HALF_SAVED.format(part.name))
        for needed in part.needs:
            if not any(isinstance(before, needed) for before in parts[:number]):
                order = ", ".join(other.name for other in parts)
                raise ConfigError(NEEDS.format(part.name, needed.__name__, order))


class _Below:
    """Batches that are given to a part, which may yield others in their place.

    An exception that the part raises gets its name. One that the batches raise goes through the
    part, and does not.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = iter(batches)
        self._passing: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except BaseException as error:
            self._passing = error
            raise

    def above(self, wrapped: Iterable[Any], name: str) -> Iterator[Any]:
        """Yield what the part does, and name the part in its exceptions."""
        try:
            yield from wrapped
        except BaseException as error:
            if error is not self._passing:
                note_part(error, name)
            raise


@contextlib.contextmanager
def _naming(part: Part, event: str) -> Iterator[None]:
    """Note in an exception in which part and event it was raised."""
    try:
        yield
    except BaseException as error:
        note_part(error, f"{part.name}.{event}")
        raise


def _leaving(context: contextlib.AbstractContextManager[Any], name: str) -> Callable[..., Any]:
    """Return what leaves a context of a part. What it raises itself then has the part's name. What
    goes through it goes on, also where the context would end it: the run has failed.
    """

    def leave(kind: Any, passing: BaseException | None, trace: Any) -> None:
        try:
            context.__exit__(kind, passing, trace)
        except BaseException as error:
            if error is not passing:
                note_part(error, name)
            raise

    return leave
