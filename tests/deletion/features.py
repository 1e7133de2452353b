"""The files that can go by themselves, and which tests are a file's own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .texts import text_of

ROOT = Path(__file__).resolve().parents[2]
PARTS = "ddpkit/parts"
#: Files of the room that are no feature: the interface, who hears what, what `--help` says.
INTERFACE = ("__init__.py", "events.py", "own.py", "part.py", "yaml_help.py")

#: Tests that import each module of the package, which one that is gone cannot pass.
OF_EVERY_MODULE = (
    "test_every_module_of_the_face_is_reached_from_the_package_and_named_for_type_checkers",
    "test_importing_every_module_changes_nothing",
    "test_a_module_of_the_face_says_which_of_its_names_are_for_users",
)


@dataclass(frozen=True)
class Feature:
    """A file that can go, and how its own tests are known.

    A test is its own if its name, its parameters or its text (with what it uses of its file) have
    one of the words, if it uses one of the fixtures, or if it stands in one of the files.

    Attributes:
        path: of the file, from the root of the repository.
        words: a pattern.
        tests: files or folders of tests, from the root.
        fixtures: names.
        users: files of other features that import it: they go with it, and so do their own tests.
    """

    path: str
    words: str
    tests: tuple[str, ...] = ()
    fixtures: tuple[str, ...] = ()
    users: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The file as imports name it."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def owns_file(self, path: str) -> bool:
        """Say whether all tests of a file are its own.

        Args:
            path: from the root.
        """
        return any(path == own or path.startswith(f"{own}/") for own in self.tests)

    def owns_test(self, item) -> bool:
        """Say whether one test is its own, as pytest has collected it."""
        example = getattr(item, "dtest", None)  # of a docstring
        if example is not None:
            return re.search(self.words, f"{item.nodeid}\n{example.docstring}") is not None
        if set(self.fixtures) & set(item.fixturenames) or item.originalname in OF_EVERY_MODULE:
            return True
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        named = [getattr(value, "__name__", "") for value in parameters.values()]
        used = [text_of(item.path, name) for name in (item.originalname, *named)]
        texts = (item.nodeid, repr(parameters), *used)
        return any(re.search(self.words, text) for text in texts)


_SEVERAL = ("tests/strategies/test_strategies.py",)  # it imports each of them at its top

# an estimate asks each strategy that has a name
_ESTIMATES = ("tests/see/estimate/test_command.py", "tests/ranks/test_estimated_memory.py")

_AROUND = ("tests/parts/test_around_fit.py",)  # it tries all parts that options ask for

#: The strategies and what else can go; a part only where its classes do not say all of it.
TABLE = (
    Feature(
        "ddpkit/parts/garbage_collection.py",
        r"gc_interval|GarbageCollection",
        tests=(*_AROUND, "tests/contract/test_garbage.py"),
    ),
    Feature(
        "ddpkit/parts/batch_statistics.py",
        r"renew_batch_statistics|\bbatch_statistics\b",
        tests=("tests/parts/test_averaged_weights.py",),
    ),
    Feature(  # a thread that posts, of which parts are made
        "ddpkit/parts/latest_poster.py",
        r"LatestPoster|latest_poster",
        users=("ddpkit/parts/kubeflow_progress.py",),
    ),
    Feature(
        "ddpkit/parts/hash_chain.py",
        r"hash_(every|chain)|HashChain|see[./]diff|cli[./]diff",  # `diff` checks chains
        tests=(
            *_AROUND,
            "tests/parts/test_hash_chain.py",
            "tests/ranks/test_hash_chain.py",
            "tests/see/diff",
            "ddpkit/see/diff",
        ),
    ),
    Feature(  # the end of the steps that `diff --replay` makes again
        "ddpkit/parts/replay_end.py",
        r"replay_end|ReplayEnd|see[./]diff|cli[./]diff",
        tests=(*_AROUND, "tests/see/diff", "ddpkit/see/diff"),
    ),
    Feature(  # digests of tensors, of which the chain is made
        "ddpkit/parts/state_digests.py",
        r"state_digests|StateDigests",
        users=(
            "ddpkit/parts/hash_chain.py",
            "ddpkit/parts/audit_inquiry.py",
            "ddpkit/parts/shard_again.py",
            "ddpkit/parts/rank_audit.py",
        ),
    ),
    Feature(
        "ddpkit/parts/rank_audit.py",
        r"audit_every|RankAudit|rank_audit|planted_audits",
        tests=(
            *_AROUND,
            "tests/parts/test_rank_audit.py",
            "tests/ranks/test_rank_audit.py",
        ),
    ),
    Feature(
        "ddpkit/parts/audit_inquiry.py",
        r"audit_inquiry|AuditInquiry",
        users=("ddpkit/parts/rank_audit.py",),
    ),
    Feature(
        "ddpkit/parts/audit_verdict.py",
        r"audit_verdict",
        users=("ddpkit/parts/audit_inquiry.py", "ddpkit/parts/rank_audit.py"),
    ),
    Feature(
        "ddpkit/parts/shard_again.py",
        r"shard_again|ShardAgain",
        users=("ddpkit/parts/rank_audit.py",),
    ),
    Feature(
        "ddpkit/parts/batch_copies.py",
        r"batch_copies",
        users=("ddpkit/parts/shard_again.py", "ddpkit/parts/rank_audit.py"),
    ),
    Feature(
        "ddpkit/parts/kept_attributes.py",
        r"kept_attributes",
        users=("ddpkit/parts/shard_again.py", "ddpkit/parts/rank_audit.py"),
    ),
    Feature(
        "ddpkit/parts/learning_rate_scaling.py",
        r"lr[_-]scal|LrScaling|LearningRateScaling|plateau-and-vectors|scales_rate=True",
        tests=(*_AROUND, "tests/contract/test_lr_scaling.py", "tests/ranks/test_lr_scaling.py"),
    ),
    Feature(
        "ddpkit/parts/memory_snapshots.py",
        r"memory_snapshot|MemorySnapshots|profile_training",  # a profile has them, too
        tests=(*_AROUND, "tests/parts/test_memory_snapshots.py"),
    ),
    Feature(
        "ddpkit/parts/profiling.py",
        r"profile_training|Profiling",
        tests=_AROUND,
    ),
    Feature(
        "ddpkit/strategies/data_parallel.py",
        r"(?i)data_?parallel",
        tests=(*_SEVERAL, *_ESTIMATES, "tests/unit/test_ema.py"),
    ),
    Feature(
        "ddpkit/strategies/ddp.py",
        # with a process group, the strategy that is chosen by itself; and an option of DDP
        r"(?i)ddp(?!kit)|nproc|torchrun|init_process_group|static_graph",
        tests=(
            *(*_SEVERAL, *_ESTIMATES),
            *("tests/strategies/test_averages.py", "tests/ranks/test_gpus.py"),
            "tests/launch/test_notebook.py",
        ),
        fixtures=("ranks",),
        users=(
            "ddpkit/strategies/local_sgd.py",
            "ddpkit/strategies/virtual_zero1.py",
            "ddpkit/strategies/zero1.py",
        ),
    ),
    Feature(
        "ddpkit/strategies/fsdp.py",
        r"(?i)fsdp",
        # a benchmark loads it
        tests=(*_ESTIMATES, "tests/ranks/test_fsdp.py", "tests/test_benchmarks.py"),
        users=("ddpkit/strategies/virtual_fsdp.py",),
    ),
    Feature(
        "ddpkit/strategies/local_sgd.py",
        r"(?i)local[_-]?sgd",
        tests=(*_ESTIMATES, "tests/ranks/test_local_sgd.py"),
    ),
    Feature(
        "ddpkit/strategies/virtual_ranks.py",
        r"(?i)virtual[_-]?ranks",
        tests=(
            *(*_SEVERAL, *_ESTIMATES, "tests/ranks/test_virtual_ranks.py"),
            "tests/strategies/test_early_sums.py",
            "tests/ranks/test_rank_audit.py",  # only they can be audited
        ),
        users=("ddpkit/strategies/virtual_fsdp.py", "ddpkit/strategies/virtual_zero1.py"),
    ),
    Feature(
        "ddpkit/strategies/virtual_fsdp.py",
        r"(?i)virtual[_-]?fsdp",
        tests=(
            *(*_ESTIMATES, "tests/ranks/test_virtual_fsdp.py"),
            *("tests/ranks/test_hash_chain.py", "tests/parts/test_rank_audit.py"),
        ),
    ),
    Feature(
        "ddpkit/strategies/virtual_zero1.py",
        r"(?i)virtual[_-]?zero1",
        tests=(
            *(*_ESTIMATES, "tests/ranks/test_virtual_zero1.py"),
            *("tests/ranks/test_hash_chain.py", "tests/ranks/test_rank_audit.py"),
            "tests/strategies/test_early_sums.py",
        ),
    ),
    Feature(
        "ddpkit/strategies/zero1.py",
        r"(?i)zero1",
        tests=(
            *(*_ESTIMATES, "tests/ranks/test_zero1.py", "tests/test_benchmarks.py"),
            "tests/cli/test_commands_on_shards.py",  # the shards are of optimizers
        ),
        users=("ddpkit/strategies/virtual_zero1.py",),
    ),
    Feature(
        "ddpkit/run/auto_micro_batch.py",
        r"auto_micro_batch|AutoMicroBatch|auto-micro-batch",
        tests=("tests/ranks/test_auto_micro_batch.py",),
    ),
    Feature(
        "ddpkit/run/measured_slice.py",
        r"(?i)slice|\bscale\b",
        tests=("tests/see/scale", "tests/see/doctor/test_recipe_loader.py"),
    ),
    Feature(
        "ddpkit/run/memory_rehearsal.py",
        r"(?i)estimate|rehears",
        tests=("tests/see/estimate", "tests/ranks/test_estimated_memory.py"),
    ),
    Feature(
        "ddpkit/parity/__init__.py",
        r"parity",
        tests=("tests/parity", "ddpkit/parity"),
    ),
    Feature(
        "ddpkit/training/device_prefetch.py",
        r"prefetch_to_device|moved?_ahead",
        tests=("tests/training/test_device_prefetch.py",),
    ),
    Feature(  # what is there for recipes of SpeechBrain
        "ddpkit/porting/__init__.py",
        r"(?i)\bport\b|porting|speechbrain",
        tests=("tests/porting", "tests/speechbrain", "ddpkit/porting", "ddpkit/speechbrain"),
    ),
)


def features(root: Path = ROOT) -> list[Feature]:
    """Return all that can go: the table, and each other file of ``ddpkit/parts``.

    A part that the table lacks is known by its classes, and its own tests are those that name one
    of them, and the file of tests that is called as the part.

    Args:
        root: of a copy of the repository.
    """
    told = {feature.path for feature in TABLE}
    others = [
        path
        for path in sorted((root / PARTS).glob("*.py"))
        if path.name not in INTERFACE and f"{PARTS}/{path.name}" not in told
    ]
    return [*TABLE, *map(_by_its_classes, others)]


def made_unimportable(source: str) -> str:
    """Return the text of a module that raises when it is imported; all that follows still stands.

    So what reads the file, such as a measure of the house or the snapshot of messages, finds it as
    it was.

    Args:
        source: of the module.
    """
    body = ast.parse(source).body
    last = 0  # the line after which something may be raised
    for node in body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            break
        last = node.end_lineno
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:last], "raise ImportError(__name__)\n", *lines[last:]])


def unknown_tests(chosen: Iterable[Feature], root: Path = ROOT) -> list[str]:
    """Name the tests of the table that are not there."""
    return [
        f"{feature.path}: {path}"
        for feature in chosen
        for path in feature.tests
        if not (root / path).exists()
    ]


def goes_with(feature: Feature, every: Sequence[Feature]) -> list[Feature]:
    """Return a feature and those that are made of it."""
    return [feature, *(other for other in every if other.path in feature.users)]


def _by_its_classes(path: Path) -> Feature:
    classes = [
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    words = "|".join(rf"\b{name}\b" for name in (path.stem, *classes))
    own = f"tests/parts/test_{path.name}"
    exists = (path.parents[2] / own).exists()
    return Feature(f"{PARTS}/{path.name}", words, tests=(own,) if exists else ())
