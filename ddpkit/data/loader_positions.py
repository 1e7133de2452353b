"""Where a loader stands, for a checkpoint: at a step, at the begin or end of a pass, after a call
of ``fit``.

Each function that takes a state has one that gives it back. The states of a checkpoint stand under
these keys of its ``ranks.ckpt``, where :func:`places_of` puts them:

================  =========================  ==========================  =========================
key               taken by                   given back by               when it is given back
================  =========================  ==========================  =========================
``loader``        :func:`state_at`           :func:`resume_at`           in the middle of an epoch
``loader_begin``  :func:`state_at_begin`     :func:`resume_after_end`,   at the begin of the same
                                             then :func:`resume_at`      epoch: the save was made
                                             with step 0                 in its first batch
``loader_end``    :func:`state_at_end`       :func:`resume_after_end`    at the begin of the next
                                                                         epoch
``stream``        :func:`stream_state`       :func:`resume_after_call`   at the begin of the next
                                                                         call of ``fit``, whose
                                                                         loader is made anew
================  =========================  ==========================  =========================

Only a checkpoint of the first batch has ``loader_begin``, and only a :class:`LoopedLoader` has
``stream``: of another loader, ``loader_end`` also serves the next call. What a next call begins
with has a key of its own, ``last_call``, which no file has (:func:`places_after_call`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpkit.data.looped_loader import LoopedLoader, inner_loader
from ddpkit.data.pass_progress import batch_unit, stream_marks
from ddpkit.data.saveable_loader import SaveableDataLoader

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The keys of a file, of which a rank takes over those that all ranks have alike.
PLACES = ("loader", "loader_begin", "loader_end", "stream")


def state_at(loader: Any, step: int) -> Any:
    """Return what a loader needs to go on after ``step`` batches of an epoch, beyond their number.

    Args:
        loader: any.
        step: batches done, not read.

    Returns:
        Plain containers and what the stream's own state holds; None where the number says it all,
        or where the data cannot tell and has to be read again.

    Ranks: local.

    Example:
        >>> state_at([1, 2], 1) is None
        True
    """
    if isinstance(loader, LoopedLoader):
        return loader.state_in_pass(int(loader.step == step + 1))
    marks = stream_marks(loader)
    around = None if marks is None else marks.around(step)
    return None if around is None else {**around, "step": step, "batch": batch_unit(loader)}


def resume_at(
    loader: Any,
    step: int,
    state: Any,
    *,
    same_batches: bool = True,
) -> int:
    """Have a loader's next iteration go on after ``step`` batches.

    Args:
        loader: any.
        step: batches done.
        state: what :func:`state_at` returned for it.
        same_batches: whether a batch is the same part of an optimizer step as it was when the state
            was taken.

    Returns:
        How many batches of that iteration are to be read and left out.

    Ranks: local.

    Example:
        >>> resume_at([1, 2], 1, None)
        1
    """
    if isinstance(loader, LoopedLoader):
        loader.resume_at(step, state)
        return 0
    if isinstance(loader, SaveableDataLoader):
        loader.skip_next(step)
        return 0
    marks = stream_marks(loader)
    if marks is None or state is None or not step:
        return step
    size = batch_unit(loader)
    same_batches = same_batches and (state.get("step", step), state.get("batch", size)) == (
        step,
        size,
    )
    number, place = state["again"] if same_batches else (step, state["next"])
    if place is None:
        return step
    marks.go_on(number, place)
    return step - int(number)


def keep_states(loader: Any) -> None:
    """Have a loader remember what :func:`state_at` will ask for, which costs a look at its data's
    state per batch.

    Args:
        loader: any.

    Ranks: local.

    Example:
        >>> keep_states([1, 2])
    """
    marks = stream_marks(inner_loader(loader))
    if marks is not None:
        marks.want()


def state_at_begin(loader: Any) -> Any:
    """Return what a loader needs to begin an epoch again, while its first batch is worked on; or
    None.

    It is for :func:`resume_after_end`, and for :func:`resume_at` with a step of 0.

    Args:
        loader: any.

    Ranks: local.

    Example:
        >>> state_at_begin([1, 2]) is None
        True
    """
    if isinstance(loader, LoopedLoader):
        return loader.state_in_pass(loader.step)
    marks = stream_marks(loader)
    return None if marks is None else marks.at_begin()


def state_at_end(loader: Any) -> Any:
    """Return what a loader takes over from one epoch into the next, or None.

    Ranks: local.

    Example:
        >>> state_at_end([1, 2]) is None
        True
    """
    if isinstance(loader, LoopedLoader):
        return loader.state_in_pass()
    marks = stream_marks(loader)
    return None if marks is None else marks.at_end()


def resume_after_end(loader: Any, state: Any) -> None:
    """Restore the state that a loader carries over from the epoch before.

    Args:
        loader: any.
        state: what :func:`state_at_end` returned.

    Ranks: local.

    Example:
        >>> resume_after_end([1, 2], None)
    """
    if isinstance(loader, LoopedLoader):
        loader.resume_in_pass(state)
        return
    marks = stream_marks(loader)
    if marks is not None and state is not None:
        marks.resume_after_end(state)


def stream_state(loader: Any) -> Any:
    """Return where the stream of a loader is now, for another loader of it; None where it cannot
    say that.

    Args:
        loader: any.

    Ranks: local.

    Example:
        >>> stream_state([1, 2]) is None
        True
    """
    marks = stream_marks(inner_loader(loader))
    return None if marks is None else marks.at_end()


def resume_after_call(loader: Any, state: Any) -> None:
    """Have a loader begin where the loader of an earlier call of ``fit`` has left their stream.

    Args:
        loader: made anew, of the same stream.
        state: what :func:`stream_state` returned then; None changes nothing.

    Ranks: local.

    Example:
        >>> resume_after_call([1, 2], None)
    """
    if not isinstance(loader, LoopedLoader):
        resume_after_end(loader, state)
        return
    marks = stream_marks(loader.loader)
    if marks is not None and state is not None:
        marks.put_at(state)  # a stream at its end is begun again by the next pass


def places_of(
    loader: Any,
    step: int,
    *,
    has_begin: bool = False,
) -> dict[str, Any]:
    """Return all that a checkpoint holds of where a loader stands, by the keys of its file.

    Args:
        loader: any.
        step: batches of the epoch that are done, not read.
        has_begin: whether the epoch is begun again, as the save is made in its first batch.

    Ranks: local.

    Example:
        >>> places_of([1, 2], 1)
        {'loader': None, 'loader_end': None}
    """
    places = {"loader": state_at(loader, step), "loader_end": state_at_end(loader)}
    if has_begin:
        places["loader_begin"] = state_at_begin(loader)
    if isinstance(loader, LoopedLoader):
        places["stream"] = stream_state(loader)
    return places


def unread_places(places: Mapping[str, Any]) -> dict[str, Any]:
    """Return the places that stay as they are while a loader is put there and reads nothing.

    Args:
        places: that a checkpoint held of it.

    Ranks: local.

    Example:
        >>> unread_places({"loader": 3})
        {'loader': 3, 'loader_end': None}
    """
    return {name: places.get(name) for name in ("loader", "loader_end")}


def begin_at(loader: Any, places: Mapping[str, Any]) -> int:
    """Have a loader begin an epoch where a checkpoint says.

    Args:
        loader: any.
        places: by their keys; what is missing changes nothing.

    Returns:
        How many batches are to be read and left out.

    Ranks: local.

    Example:
        >>> begin_at([1, 2], {})
        0
    """
    begin = places.get("loader_begin")  # of a save in this epoch's first batch
    resume_after_end(loader, places.get("loader_end") if begin is None else begin)
    resume_after_call(loader, places.get("last_call"))
    return resume_at(loader, 0, begin)


def places_after_call(
    before: Any,
    places: Mapping[str, Any],
    loader: Any,
) -> dict[str, Any]:
    """Return where a loader begins in a call of ``fit``, by what the call before has left.

    Args:
        before: the loader of that call, or None.
        places: of it, when the call ended.
        loader: of this call.

    Returns:
        For :func:`begin_at`; empty where nothing goes on from call to call.

    Ranks: local.

    Example:
        >>> places_after_call([1], {"loader_end": 3}, [1])
        {}
    """
    has_nominal_epochs = isinstance(before, LoopedLoader)
    if has_nominal_epochs and before is loader:  # it goes on from call to call
        return {"loader_end": places.get("loader_end")}
    stream = _stream_of(before)
    if stream is None or stream is not _stream_of(loader):
        return {}
    # so does a stream, in a loader made anew
    return {"last_call": places.get("stream" if has_nominal_epochs else "loader_end")}


def has_own_file(loader: Any) -> bool:
    """Say whether a loader that ddpkit has made is also saved by itself, in a file of its own.

    Args:
        loader: any.

    Ranks: local.

    Example:
        >>> has_own_file(LoopedLoader([1, 2], 1)), has_own_file([1, 2])
        (True, False)
    """
    return isinstance(loader, (SaveableDataLoader, LoopedLoader))


def _stream_of(loader: Any) -> Any:
    """Return the user's own stream if it keeps its position between epochs, or None."""
    position = getattr(inner_loader(loader), "position", None)
    return None if position is None else position.whole
