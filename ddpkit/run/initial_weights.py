"""What ``--init_from`` gives a new run: weights by name, the same on all ranks. What does not fit
is reported.
"""

from __future__ import annotations

import functools
import hashlib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ddpkit.base import POSITION, unwrap
from ddpkit.checkpointing import (
    DIRECTORY_PREFIX,
    UPDATES_OF_AVERAGE,
    Checkpoint,
    Misfits,
    base_of,
    copies_what_it_loads,
    fetch_on_each_machine,
    find_transfer_hook,
    find_weights,
    load_recoverables,
    load_without_base,
    loose_key,
    nothing_fits,
    other_base,
    read_weights,
    shape_text,
    source_now,
    torch_parameter_transfer,
)
from ddpkit.comm import on_every_rank, require_agreement
from ddpkit.distributed import get_world_size, run_on_main
from ddpkit.errors import CheckpointError, CheckpointUsageError, ConfigError
from ddpkit.launch import find_launch
from ddpkit.logger import get_logger, shown_path
from ddpkit.object_store import is_url
from ddpkit.run.choose_start import NEVER
from ddpkit.run.unsaved_objects import modules_not_saved
from ddpkit.strategies import is_on_meta

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import nn

    from ddpkit.base import LoadHook
    from ddpkit.checkpointing import LoadMode, VerifyMode, WeightSource
    from ddpkit.run.checkpoint_policy import CheckpointPolicy
    from ddpkit.run.choose_start import Start
    from ddpkit.training import RunContext

logger = get_logger(__name__)

T = TypeVar("T")

BLOCK_BYTES = 4 << 20
MOST_LINES = 5  # of each kind of what does not fit
ALL = "all"
ENDS_OF_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".tar")
NOT_USED = "{} is not used: the run goes on from a checkpoint of its own"
DOES_NOT_FIT = (
    "init_from={!r} does not fit the modules of this run:\n{}\nMake the modules as they were when "
    "this was saved. Or leave out what does not fit: --init_skip='{}', or --init_skip=all."
)
NOTHING_FITS = "init_from={!r} has none of the weights of this run:\n{}\n{}."
LEFT_OUT = "init_from: what does not fit is left out, as init_skip=%s says:\n%s"


class InitialWeights:
    """Loads the weights of ``--init_from``, once, into a run that does not go on from a checkpoint.

    Modules without values get theirs when they are wrapped, and are loaded after that.

    Args:
        context: of the run.
        policy: knows which recoverables are saved under which name.

    Attributes:
        row: what is said of it at the start; empty without the option.

    Ranks: collective.
    """

    def __init__(self, context: RunContext, policy: CheckpointPolicy) -> None:
        self.context = context
        self.policy = policy
        self.row = ""
        self._is_due = False
        self._is_base = False
        self._found: WeightSource | Exception | None = None
        self._misfits = Misfits()
        self._count = 0  # of the entries that are loaded
        # modules that were loaded from files without their base, by name, and its fingerprints
        self._bases: list[tuple[str, nn.Module, Mapping[str, str]]] = []

    def find_before_move(self) -> None:
        """Find the files before ``--resume=never`` moves the checkpoints of the folder, of which
        one may be meant.

        Raises:
            ConfigError: there is nothing. On every rank, before anything is moved.
            CheckpointError: it is damaged. Likewise.
        """
        options = self.context.options
        is_first = not self.policy.run_state.calls.number
        if options.init_from is None or options.resume != NEVER or not is_first:
            return
        self._found = _found_on_main(options.init_from, options.ckpt_verify)
        # a run that its launcher has restarted may go on from a checkpoint of its own
        begins = run_on_main(lambda: not find_launch().restart_count)
        if begins and isinstance(self._found, Exception):
            raise self._found

    def begin(self, start: Start | None) -> None:
        """Load the weights if this call of ``fit`` begins a new run and its modules have values.

        Args:
            start: of this call; None without a checkpointer.

        Raises:
            ConfigError: there is nothing, or it does not fit. On every rank.
            CheckpointError: it cannot be read, or would run code. On every rank.
        """
        given = self.context.options.init_from
        if given is None or self.policy.run_state.calls.number > 1:
            return
        goes_on = start is not None and isinstance(start.resume, Checkpoint)
        if goes_on and not self._are_base():
            self.row = NOT_USED.format(given)
            return
        self._is_due = True
        self._is_base = goes_on
        if not is_on_meta(self.context.modules):
            self.load_if_due()

    def begin_evaluation(self) -> None:
        """Load the weights for an evaluation without a training and without a checkpoint."""
        given = self.context.options.init_from
        is_trained = self.policy.run_state.calls.number > 0
        if given is None or is_trained:
            return
        if self.policy.newest() is not None and not self._are_base():
            return
        self._is_due = not self.row
        if not is_on_meta(self.context.modules):
            self.load_if_due()

    def _are_base(self) -> bool:
        """Say whether the run's own checkpoints need them: they hold only what is trained."""
        checkpointer = self.policy.checkpointer
        return checkpointer is not None and bool(checkpointer.trained_only)

    def load_if_due(self) -> None:
        """Load the weights, if that was put off until the modules have values.

        Raises:
            ConfigError, CheckpointError: as for :meth:`begin`.
        """
        if not self._is_due:
            return
        self._is_due = False
        self._misfits = Misfits()
        self._count = 0
        self._bases = []
        options = self.context.options
        given = str(options.init_from)
        with POSITION.at("loading the weights of init_from"):
            source = self._source(given)
            verify_mode = cast("VerifyMode", options.ckpt_verify)
            fetch_on_each_machine(source.path, options.ckpt_load, verify_mode)
            files, take = self._plan(source)
            if options.ckpt_load == "all":
                _require_same_files(files)
                _on_every_rank(functools.partial(self._load, source, files, take))
            else:
                self._load(source, files, take)  # tells by itself on which rank it fails
            self._compare_bases()
            _on_every_rank(functools.partial(self._judge, source))
        self.row = f"{self._count} tensors of {shown_path(source.path)}"
        if self._is_base:
            self.row += ", as the base; what is trained comes from the checkpoint"
        if self._misfits:
            self.row += f"; {len(self._misfits)} that do not fit are left out (--init_skip)"

    def _source(self, given: str) -> WeightSource:
        found = self._found or _found_on_main(given, self.context.options.ckpt_verify)
        if isinstance(found, Exception):
            raise found
        if self._found is None:
            return found
        return cast("WeightSource", run_on_main(source_now, (found,)))

    def _load(self, source: WeightSource, files: Mapping[str, Path], take: LoadHook) -> None:
        load_recoverables(
            dict.fromkeys(files, take),
            {name: name for name in files},
            Checkpoint(source.path, {}, dict(files)),
            cast("LoadMode", self.context.options.ckpt_load),
        )

    def _compare_bases(self) -> None:
        """Compare base weights that a file leaves out, once all ranks have loaded what it holds:
        where they are divided, the ranks do it together.
        """
        for name, module, base in self._bases:
            found = other_base(module, base)
            self._misfits |= Misfits(based={f"{name}.{key}": words for key, words in found.items()})

    def _plan(self, source: WeightSource) -> tuple[dict[str, Path], LoadHook]:
        """Return the files that are loaded, by name, and what loads one of them."""
        if not source.files:
            return {source.path.name: source.path}, self._take_one_file
        targets = self._targets(source)
        for name in sorted(targets.keys() - source.files.keys()):
            self._note(name, targets[name], nothing_fits(targets[name]))
        files = {name: source.files[name] for name in targets if name in source.files}
        return files, functools.partial(self._take_recoverable, targets)

    # ------------------------------------------------------------------ one file for all modules

    def _take_one_file(self, _: str, path: Path, __: bool) -> None:
        modules = {
            name: module
            for name, module in self.context.modules.items()
            if unwrap(module).state_dict()
        }
        can_map = all(map(copies_what_it_loads, modules.values()))
        state = read_weights(path, mmap=can_map, lazily=True)
        divided, others = _divided(state, modules)
        for name, module in modules.items():
            self._take(name, module, divided[name])
        self._misfits |= others

    # ------------------------------------------------------------------ a file for each recoverable

    def _take_recoverable(
        self,
        targets: Mapping[str, nn.Module],
        name: str,
        path: Path,
        _: bool,
    ) -> None:
        module = targets[name]
        hook = find_transfer_hook(module)
        if hook is not None and hook is not torch_parameter_transfer:
            hook(module, path)  # its class knows what fits
            self._note(name, module, Misfits())
            return
        state = read_weights(path, mmap=copies_what_it_loads(module), lazily=True)
        self._take(name, module, state)

    def _targets(self, source: WeightSource) -> dict[str, Any]:
        """Return what is loaded from a checkpoint, by the name of its file there."""
        modules = self.context.modules
        saved = self.policy.recoverable_modules()
        apart = set(modules_not_saved(modules, saved))
        own = {
            name: module
            for name, module in modules.items()
            if name not in saved and (name in apart or name in source.files)
        }
        return {**saved, **own}

    # ------------------------------------------------------------------ what does not fit

    def _take(self, name: str, module: nn.Module, state: Mapping[str, Any]) -> None:
        self._note(name, module, load_without_base(module, state))
        if base := base_of(state):
            self._bases.append((name, module, base))

    def _note(self, name: str, module: nn.Module, misfits: Misfits) -> None:
        lost = len(misfits.missing) + len(misfits.reshaped)
        self._count += len(unwrap(module).state_dict()) - lost
        self._misfits |= misfits.renamed(lambda key: f"{name}.{key}")

    def _judge(self, source: WeightSource) -> None:
        given = self.context.options.init_from
        if not self._count:
            raise CheckpointUsageError(
                NOTHING_FITS.format(given, _indented(self._misfits), self._advice(source))
            )
        wrong = self._misfits.without(self._may_be_left_out)
        if wrong:
            advice = f"{wrong.names()[0].rpartition('.')[0]}.*"
            raise CheckpointUsageError(DOES_NOT_FIT.format(given, _indented(wrong), advice))
        if self._misfits:
            names = ",".join(self.context.options.init_skip or ())
            logger.warning(LEFT_OUT, names, _indented(self._misfits))

    def _advice(self, source: WeightSource) -> str:
        """Say what the names in what was given have to be."""
        modules = list(self.context.modules)
        if source.files:
            return (
                f"The checkpoint has the files {', '.join(source.files)}. Give one of them, such "
                f"as --init_from={next(iter(source.files.values()))}, or a checkpoint of this model"
            )
        if len(modules) > 1:
            return (
                f"The run has the modules {', '.join(modules)}: names in one file for all begin "
                f"with theirs, as in {modules[0]}.weight"
            )
        return (
            "Give a file of this model, or rename what is in it with "
            "ddpkit.checkpoints.map_old_state_dict_weights"
        )

    def _may_be_left_out(self, name: str) -> bool:
        patterns = self.context.options.init_skip or ()
        bare = name.partition(".")[2]
        return any(
            pattern == ALL or fnmatchcase(name, pattern) or fnmatchcase(bare, pattern)
            for pattern in patterns
        )


def _indented(misfits: Misfits) -> str:
    return "\n".join(f"  {line}" for line in misfits.lines(MOST_LINES))


def _on_every_rank(work: Callable[[], T]) -> T:
    return work() if get_world_size() == 1 else on_every_rank(work)


def _found_on_main(given: str, verify: Any) -> WeightSource | Exception:
    """Find the files on the main process; what it cannot find is the same error on every rank."""
    place = _place_of_url(given)

    def look() -> WeightSource | Exception:
        try:
            return find_weights(given, verify, place)
        except (CheckpointError, ConfigError, OSError) as error:
            return error

    found = run_on_main(look)
    return cast("WeightSource | Exception", found)


def _place_of_url(given: str) -> Path | None:
    """Return where what a URL names stands on this machine, on every rank; None of a path.

    Which part of a URL is a folder of checkpoints, its end tells: that of a checkpoint or of a file
    is the folder that it is in.
    """
    if not is_url(given):
        return None
    from ddpkit.mirror import mirror_of  # nothing else needs it

    parts = given.rstrip("/").split("/")
    names = [
        number
        for number, part in enumerate(parts)
        if part.startswith(f"{DIRECTORY_PREFIX}+")
        or part in {"latest", "best"}
        or part.endswith(ENDS_OF_FILES)
    ]
    first = names[0] if names else len(parts)
    return mirror_of("/".join(parts[:first])).joinpath(*parts[first:])


def _require_same_files(files: Mapping[str, Path]) -> None:
    """Refuse ranks that would read other files: of their own disks, or while one is replaced.

    Raises:
        CheckpointError: a rank cannot read a file. On every rank.
        RankMismatchError: they differ.
    """
    if get_world_size() > 1:
        require_agreement(on_every_rank(functools.partial(_digests, files)))


def _digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return a digest of each file, or folder of files, by its name."""
    found = {}
    for name, path in files.items():
        digest = hashlib.sha256()
        try:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                _add_file(digest, file, str(file.relative_to(path)))
        except OSError as error:
            raise CheckpointError(f"init_from: {path} cannot be read: {error}.") from error
        found[f"file {name} of init_from"] = f"sha256 {digest.hexdigest()[:16]}"
    return found


def _add_file(digest: Any, path: Path, name: str) -> None:
    digest.update(name.encode(errors="surrogateescape"))
    if path.is_dir():
        return
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)


def _divided(
    state: Mapping[str, Any],
    modules: Mapping[str, nn.Module],
) -> tuple[Mapping[str, Mapping[str, Any]], Misfits]:
    """Divide the weights of one file between the modules; of one module, names may be its own.

    Returns:
        The entries of each module, by its name; and those of none.
    """
    if len(modules) == 1:
        ((name, module),) = modules.items()
        own = {loose_key(key) for key in unwrap(module).state_dict()}
        begin = f"{name}."
        bare = sum(loose_key(key) in own for key in state)
        full = sum(loose_key(key).removeprefix(begin) in own for key in state if begin in key)
        if bare >= full:
            return {name: state}, Misfits()
    divided: dict[str, dict[str, Any]] = {name: {} for name in modules}
    others: dict[str, Any] = {}
    for key, value in state.items():
        name, _, rest = loose_key(key).partition(".")
        if name in divided and rest:
            divided[name][rest] = value
        elif key != UPDATES_OF_AVERAGE:
            others[key] = value
    return divided, Misfits(unexpected={key: shape_text(value) for key, value in others.items()})
