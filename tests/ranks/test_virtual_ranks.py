"""The same bits on any number of processes: ``--virtual_ranks``."""

from __future__ import annotations

import functools
import hashlib
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, default_collate
from torch.utils.data.distributed import DistributedSampler

from ddpkit.checkpoints import Checkpointer
from ddpkit.distributed import get_rank
from ddpkit.epoch_loop import EpochCounter
from ddpkit.errors import CheckpointError, ConfigError, RankMismatchError
from ddpkit.syncbn import SyncBatchNorm
from ddpkit.types import Stage
from tests.cells import some_of
from tests.host_reads import HostReads
from tests.needs import needs_torch
from tests.recipes import BackwardByHand, Killed, Regression

FEATURES = 12
CLASSES = 4


def points(number=53):
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(number, FEATURES, generator=draw)
    return list(zip(inputs, torch.randint(0, CLASSES, (number,), generator=draw), strict=True))


def make_net(norm):
    torch.manual_seed(1)
    middle = {"layer": nn.LayerNorm(16), "batch": nn.BatchNorm1d(16)}[norm]
    return nn.Sequential(
        nn.Linear(FEATURES, 16),
        middle,
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(16, CLASSES),
    )


class Classifier(Regression):
    """Classifies with noise; says all that it was told."""

    counts = False
    dies_at = None

    def compute_forward(self, batch, stage):
        return self.modules.head(self.modules.net(batch[0]))

    def compute_objectives(self, predictions, batch, stage):
        losses = nn.functional.cross_entropy(predictions, batch[1], reduction="none")
        self.log("right", (predictions.argmax(-1) == batch[1]).float().mean())
        if self.counts:
            real = (batch[1] > 0) * 0.7
            return (losses * real).sum(), real.sum()
        return losses.mean()

    def on_fit_batch_start(self, batch, should_step):
        if self.dies_at == (self.progress.epoch, self.optimizer_step):
            raise Killed

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.told = [
            *getattr(self, "told", []),
            (stage.name, epoch, stage_loss, torch.rand(1).item()),
        ]


class Counting(Classifier):
    counts = True


class OwnBatch(Classifier):
    """Two losses of one batch, each with its own backward pass; accumulates under no_sync, and
    steps by should_step.
    """

    def fit_batch(self, batch):
        with self.no_sync(not self.should_step):
            loss = self.compute_objectives(
                self.compute_forward(batch, Stage.TRAIN),
                batch,
                Stage.TRAIN,
            )
            self.backward(0.5 * loss, retain_graph=True)
            self.backward(0.5 * loss)
        if self.should_step:
            self.optimizers_step()
        return loss.detach()


class TwoOptimizers(Classifier):
    def init_optimizers(self):
        self.optimizers_dict = {
            "net": torch.optim.AdamW(self.modules.net.parameters(), lr=0.01),
            "head": torch.optim.SGD(self.modules.head.parameters(), lr=0.1, momentum=0.9),
        }


class Masked(nn.Linear):
    """Has a buffer with infinities, and statistics that begin to move after two steps."""

    def __init__(self):
        super().__init__(CLASSES, CLASSES)
        self.register_buffer("mask", torch.full((CLASSES, CLASSES), float("-inf")).triu(1))
        self.norm = nn.BatchNorm1d(CLASSES)
        self.steps = 0

    def forward(self, inputs):
        inputs = inputs @ self.mask.softmax(-1)
        return super().forward(self.norm(inputs) if self.steps > 1 and len(inputs) > 1 else inputs)


class Wide(nn.Sequential):
    """Has gradients that are not sent in one message."""

    def __init__(self):
        super().__init__(nn.Linear(CLASSES, 2**15), nn.Linear(2**15, CLASSES))


class Precise(nn.Linear):
    """Has gradients of another dtype than its parameters."""

    def __init__(self):
        super().__init__(CLASSES, CLASSES)
        for one in self.parameters():
            one.grad_dtype = torch.float64


class PreciseSteps(Classifier):
    def init_optimizers(self):
        self.optimizers_dict = {
            "by hand": torch.optim.SGD(self.modules.parameters(), lr=0.1, foreach=False)
        }


class Changing(TwoOptimizers):
    """Freezes and unfreezes parameters in the middle of an epoch; takes a step with no
    optimizer.
    """

    def on_fit_batch_start(self, batch, should_step):
        self.modules.head.steps = steps = self.optimizer_step - self.progress.began_at
        self.modules.net[0].requires_grad_(steps % 2 == 1)

    def freeze_optimizers(self, optimizers):
        self.asked = getattr(self, "asked", 0) + 1
        return {} if self.asked == 3 else optimizers


class Noisy(Classifier):
    def compute_forward(self, batch, stage):
        return super().compute_forward([batch[0] + 0.1 * torch.randn(()), batch[1]], stage)


class NoisySGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in (one for group in self.param_groups for one in group["params"]):
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class NoisySteps(Noisy):
    """Draws in the optimizer's step and after it, and predicts with noise."""

    def init_optimizers(self):
        self.optimizer = NoisySGD(self.modules.parameters(), lr=0.01)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if should_step:
            self.noise = torch.rand(())

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        self.told += [self.noise.item()]

    def predict_batch(self, batch):
        return self.compute_forward(batch, Stage.TEST)


class Gathering(Classifier):
    """Gathers a loss of each sample, with its dropout; a sampler draws some samples twice."""

    def on_stage_start(self, stage, epoch=None):
        self.losses = []

    def compute_objectives(self, predictions, batch, stage):
        losses = nn.functional.cross_entropy(predictions, batch[1], reduction="none")
        self.losses += losses.detach().tolist()
        return losses.mean()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        super().on_stage_end(stage, stage_loss, epoch)
        self.told += [self.gather(self.losses)]


def predict():
    brain = make(NoisySteps)
    brain.fit([1], points(53), train_loader_kwargs=LOADING)
    predicted = brain.predict(points(19), loader_kwargs={"batch_size": 1})
    return torch.stack(predicted).tolist(), brain.evaluate(
        points(7),
        test_loader_kwargs={"batch_size": 2},
    )


def noisy_collate(items):
    inputs, labels = default_collate(items)
    return [inputs + 0.1 * torch.randn(()), labels]


class ClipsByItself(Classifier):
    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        self.backward(loss)
        if self.should_step:
            nn.utils.clip_grad_norm_(self.modules.parameters(), 0.1)
            self.optimizers_step()
        return loss.detach()


class LateDtype(Classifier):
    def on_fit_batch_start(self, batch, should_step):
        for one in self.modules.parameters():
            one.grad_dtype = torch.float64


class PastTheBrain(BackwardByHand, Classifier):
    """Has a backward pass of its own."""


LOADING = {"batch_size": 2, "shuffle": True}


def make(kind=Classifier, folder=None, norm="layer", head=None, **options):
    modules = {
        "net": make_net(norm),
        "head": nn.Linear(CLASSES, CLASSES) if head is None else head(),
    }
    checkpointer = None if folder is None else Checkpointer(folder)
    given = {
        "device": "cpu",
        "noprogressbar": True,
        "virtual_ranks": 6,
        "max_grad_norm": 0.5,
        **options,
    }
    return kind(
        modules,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        run_opts=given,
        checkpointer=checkpointer,
    )


def digest(brain):
    """Hash the weights and all numbers that were reported; divided ones are gathered."""
    tensors = dict(brain.raw_modules.state_dict())
    if brain.ema is not None:
        tensors |= {
            f"ema {name}": one
            for name, one in enumerate(brain.ema.state_dict().values())
            if torch.is_tensor(one)
        }
    wholes = {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one
        for name, one in tensors.items()
    }
    data = b"".join(
        str(name).encode() + one.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, one in wholes.items()
    )
    return hashlib.sha256(data).hexdigest(), brain.optimizer_step


def train(kind=Classifier, samples=53, loading=None, valid=11, data=None, **options):
    brain = make(kind, **options)
    loading = {} if isinstance(data, Batches) else {**LOADING, **(loading or {})}
    known = points(samples)
    result = brain.fit(
        range(1, 3),
        known if data is None else data,
        known[:valid],
        train_loader_kwargs=loading,
        valid_loader_kwargs={"batch_size": 2},
    )
    return digest(brain), brain.told, result.train_loss, result.valid_loss, result.logged


class Numbered(IterableDataset):
    """A stream of points; with ``shard`` each part of it by itself."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


class NoisyPoints(Dataset):
    """Points with noise, for workers to read."""

    def __len__(self):
        return 53

    def __getitem__(self, index):
        inputs, label = points()[index]
        return inputs + 0.1 * torch.randn(()), label


class Divisible(Numbered):
    num_shards = 6

    def shard(self, num_shards, index):
        return Numbered(self.data[index::num_shards][: 7 + index % 3])


class OfOneRank(Numbered):
    def __iter__(self):
        return iter(self.data[get_rank() or 0 :])


class DividesItself(Numbered):
    is_sharded = True


class Batches:
    """A loader of one's own."""

    def __iter__(self):
        data = points()
        return iter([default_collate(data[start : start + 3]) for start in range(0, 53, 3)])


CASES = {
    "clipping, averages, divided evaluation": {"ema_decay": 0.9, "shard_evaluation": True},
    "accumulation, counts": {"kind": Counting, "grad_accumulation_factor": 3},
    "uneven shards": {"loading": {"batch_size": None}, "global_batch_size": 23},
    "uneven shards in micro-batches": {"global_batch_size": 23, "micro_batch_size": 2},
    "batch norm, bf16": {"norm": "batch", "precision": "bf16", "samples": 96},
    "two optimizers": {"kind": TwoOptimizers},
    "in several messages": {"head": Wide},
    "precise gradients": {"kind": PreciseSteps, "head": Precise, "max_grad_norm": 0},
    "what moves and is frozen changes": {"kind": Changing, "head": Masked, "samples": 96},
    "noise in collating and in a divided evaluation": {
        "kind": Noisy,
        "data": Numbered(points(96)),
        "loading": {"shuffle": False, "collate_fn": noisy_collate},
        "debug": True,
        "shard_evaluation": True,
        "valid": 48,
    },
    "noise in the optimizer": {"kind": NoisySteps},
    "gathered, of a sampler": {"kind": Gathering, "loading": "sampler"},
    "noise in workers": {
        "data": NoisyPoints(),
        "loading": {"collate_fn": noisy_collate, "num_workers": 2},
    },
    "own fit_batch": {"kind": OwnBatch, "grad_accumulation_factor": 2},
    "fewer samples than shards": {"samples": 4, "valid": 1},
    "a sampler": {"loading": "sampler"},
    "a batch sampler": {"loading": "batch_sampler"},
    "batches count the same": {"loss_weighting": "batches"},
    "a stream": {
        "data": Numbered(points()),
        "loading": {"shuffle": False},
        "grad_accumulation_factor": 2,
    },
    "a stream with shards, workers": {
        "data": Divisible(points()),
        "loading": {"shuffle": False, "num_workers": 2},
    },
    "a stream, uneven shards": {"data": Numbered(points()), "loading": {}, "global_batch_size": 23},
    "a short stream, workers": {
        "data": Numbered(points(4)),
        "loading": {"shuffle": False, "num_workers": 1},
    },
    "a stream that is debugged": {
        "data": Numbered(points()),
        "loading": {"shuffle": False},
        "debug": True,
    },
    "a limit of steps": {"optimizer_step_limit": 3},
    "batches of one's own": {"data": Batches(), "loading": {}, "kind": Counting},
}


def given_of(case):
    """Return what :func:`train` is given of a case."""
    given = dict(case)
    if given.get("loading") == "sampler":
        given["loading"] = {"sampler": RandomSampler(range(53), replacement=True), "shuffle": False}
    elif given.get("loading") == "batch_sampler":
        batches = BatchSampler(RandomSampler(range(53)), 3, drop_last=False)
        given["loading"] = {"batch_sampler": batches, "shuffle": False, "batch_size": 1}
    elif "global_batch_size" in given:
        given["loading"] = {"batch_size": 1, "shuffle": "data" not in given}
    return given


def case(name):
    return train(**given_of(CASES[name]))


# Three processes, which have shards of uneven number, show the others.
@pytest.mark.costly
@pytest.mark.corner
@pytest.mark.parametrize(
    "name",
    [
        "clipping, averages, divided evaluation",
        "uneven shards in micro-batches",
        "noise in collating and in a divided evaluation",
        "own fit_batch",
        "a stream with shards, workers",
    ],
)
def test_the_same_bits_on_one_process_and_on_two(ranks, name):
    assert ranks.run(case, name, world_size=2) == [case(name)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", some_of(CASES, [*CASES][::3]))
def test_the_same_bits_on_one_process_and_on_three(ranks, name):
    assert ranks.run(case, name, world_size=3) == [case(name)] * 3


@pytest.mark.costly
def test_noise_in_a_prediction_and_in_what_follows_is_the_same(ranks):
    assert ranks.run(predict, world_size=2) == [predict()] * 2


class Centred(nn.Linear):
    """Keeps a running mean of its inputs, which for equal shards is that of the whole batch."""

    def __init__(self):
        torch.manual_seed(2)
        super().__init__(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.double()

    def forward(self, inputs):
        outputs = super().forward(inputs - self.mean)
        if self.training:
            self.mean.lerp_(inputs.detach().mean(0), 0.3)
        return outputs


def train_centred(**options):
    """Train on batches of 4, and a last one of 3, which leaves one of four shards without a
    sample.
    """
    modules = {"net": Centred(), "head": nn.Identity()}
    given = {"device": "cpu", "noprogressbar": True, "global_batch_size": 4, **options}
    brain = Classifier(modules, lambda of: torch.optim.AdamW(of, lr=0.1), run_opts=given)
    data = [(inputs.double(), label) for inputs, label in points(11)]
    result = brain.fit([1, 2], data, train_loader_kwargs={"shuffle": True})
    return brain.raw_modules.state_dict(), result.train_loss, result.logged


def test_a_shard_without_a_sample_counts_nothing():
    """Neither in the buffers nor in the weights: as without virtual ranks, where there are no
    shards.
    """
    expected, *reported = train_centred()
    found, *shown = train_centred(virtual_ranks=4)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    assert shown[0] == pytest.approx(reported[0], rel=1e-12)
    assert shown[1]["train"] == pytest.approx(reported[1]["train"], rel=1e-6)  # in float32


class TwoTerms(nn.Module):
    """Autograd gives both terms gradients in the same memory."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.eye(CLASSES))
        self.second = nn.Parameter(torch.zeros(CLASSES, CLASSES))

    def forward(self, inputs):
        weight = self.first.view(-1) + self.second.view(-1)
        return inputs @ weight.view(CLASSES, CLASSES)


def train_two_terms(**options):
    brain = Classifier(
        {"net": nn.Linear(FEATURES, CLASSES), "head": TwoTerms()},
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_opts={"device": "cpu", "noprogressbar": True, "global_batch_size": 4, **options},
    )
    with torch.no_grad():
        brain.modules.net.weight.fill_(0.1)
        brain.modules.net.bias.copy_(torch.arange(CLASSES))
    brain.fit([1], points(8), train_loader_kwargs={"shuffle": True})
    return brain.raw_modules.state_dict()


def test_gradients_in_the_same_memory_are_added_up_once():
    """As without virtual ranks, where there is one batch for each step."""
    expected = train_two_terms(max_grad_norm=None)
    found = train_two_terms(max_grad_norm=None, virtual_ranks=4)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


def eight_shards():
    """Dropout, AdamW, clipping, averaged weights; 53 samples are three batches of 16 and one
    of 5.
    """
    return train(virtual_ranks=8, ema_decay=0.9, shard_evaluation=True)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_eight_shards_give_the_same_bits_on_one_two_four_and_eight_processes(ranks, world_size):
    assert ranks.run(eight_shards, world_size=world_size) == [eight_shards()] * world_size


def as_on_a_gpu(name):
    """Train without looking at what is in buffers, which a GPU would be waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "equal", lambda *_: False)
        return case(name)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_buffers_move_alike_where_nobody_looks_at_them(ranks, world_size):
    name = "what moves and is frozen changes"
    assert ranks.run(as_on_a_gpu, name, world_size=world_size) == [case(name)] * world_size


class Reads(HostReads):
    """Counts lists that are made of tensors, too."""

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        to_list = torch.Tensor.tolist

        def counted(tensor):
            self.count += 1
            return to_list(tensor)

        self.patch.setattr(torch.Tensor, "tolist", counted)
        return super().__enter__()

    def __exit__(self, *given):
        self.patch.undo()
        return super().__exit__(*given)


@pytest.mark.costly
def test_the_host_reads_nothing_more_of_more_shards():
    # The first backward pass of a process tries torch's engine, and reads the answer.
    train(virtual_ranks=2, samples=16)
    counts = []
    for number in (2, 8):
        with Reads() as reads:
            train(
                virtual_ranks=number,
                samples=64,
                norm="batch",
                loading={"batch_size": 16 // number},
                valid=1,
            )
        counts.append(reads.count)
    assert counts[0] == counts[1]


class Rotary(nn.Linear):
    """Has complex buffers: a table, and a state that moves."""

    def __init__(self):
        super().__init__(CLASSES, CLASSES)
        self.register_buffer(
            "table",
            torch.polar(torch.ones(CLASSES), torch.arange(1.0, 1 + CLASSES)),
        )
        self.register_buffer("state", torch.zeros(CLASSES, dtype=torch.complex64))

    def forward(self, inputs):
        if self.training:
            self.state += (inputs.detach() * self.table).mean(0)
        return super().forward(inputs) * self.table.real


def train_with_complex_buffers():
    brain = make(head=Rotary)
    brain.fit([1], points(24), train_loader_kwargs=LOADING)
    head = brain.raw_modules["head"]
    return head.state.tolist(), head.table.tolist()


@pytest.mark.costly
def test_complex_buffers_keep_what_is_imaginary(ranks):
    state, table = train_with_complex_buffers()
    assert all(one.imag for one in state)
    assert table == Rotary().table.tolist()
    assert ranks.run(train_with_complex_buffers, world_size=2) == [(state, table)] * 2


def test_an_evaluation_without_training_computes_with_one_thread_too():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    make()
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)


# ------------------------------------------------------------------------- killed, and gone on with


def go_on(folder, dies_at=None, **options):
    """Train three epochs, with checkpoints inside of them; die where it is told to."""
    brain = make(
        **{
            "kind": Counting,
            "folder": folder,
            "ema_decay": 0.9,
            "ckpt_interval_steps": 2,
            **options,
        }
    )
    brain.dies_at = dies_at
    counter = EpochCounter(3)
    brain.checkpointer.add_recoverables({"counter": counter, **brain.modules})
    data = points()
    try:
        result = brain.fit(counter, data, data[:11], train_loader_kwargs=LOADING)
    except Killed:
        return None
    told = [one[:3] for one in brain.told if one[1] == 3]
    return digest(brain), told, result.train_loss, result.valid_loss, result.logged


@pytest.mark.slow
@pytest.mark.parametrize("ways", [(2, 1), (1, 2), (3, 2, 1)], ids=str)
def test_a_run_that_goes_on_with_another_number_of_processes_has_the_same_bits(
    ranks,
    tmp_path,
    ways,
):
    expected = go_on(tmp_path / "whole")
    for world_size, dies_at in zip(ways[:-1], [(1, 3), (2, 7)], strict=False):
        for found in ranks.outcomes(go_on, tmp_path / "cut", dies_at, world_size=world_size):
            assert "Killed" in str(found.error) or found.value is None
    assert ranks.run(go_on, tmp_path / "cut", world_size=ways[-1]) == [expected] * ways[-1]


@pytest.mark.slow
def test_a_checkpoint_without_the_option_and_the_reverse_go_on_with_a_warning(tmp_path, caplog):
    go_on(tmp_path / "without", dies_at=(1, 3), virtual_ranks=None, global_batch_size=12)
    go_on(tmp_path / "with", dies_at=(1, 3), global_batch_size=12)
    caplog.clear()
    assert go_on(tmp_path / "without", global_batch_size=12) is not None
    assert [
        one.getMessage()
        for one in caplog.records
        if "virtual_ranks=6, before None" in one.getMessage()
    ]
    assert go_on(tmp_path / "with", virtual_ranks=None, global_batch_size=12) is not None
    assert [
        one.getMessage()
        for one in caplog.records
        if "virtual_ranks=None, before 6" in one.getMessage()
    ]


# --------------------------------------------------------------------------------- what cannot work


def refused(**options):
    with pytest.raises(ConfigError) as caught:
        train(**options)
    return str(caught.value)


class Unpooled(nn.Linear):
    """Has an operation for which torch has no deterministic kernel, on a CPU either; can leave it
    out in training.
    """

    def __init__(self, *, always):
        super().__init__(CLASSES, CLASSES)
        self.always = always

    def forward(self, inputs):
        outputs = super().forward(inputs)
        if self.training and not self.always:
            return outputs
        return nn.functional.max_unpool1d(
            outputs[:, None],
            torch.arange(CLASSES).expand(len(outputs), 1, -1),
            1,
        )[:, 0]


@pytest.mark.parametrize("always", [True, False], ids=["in training", "in validation"])
def test_torchs_error_about_a_kernel_that_is_not_deterministic_names_the_option(always):
    head = functools.partial(Unpooled, always=always)
    torch.use_deterministic_algorithms(True)  # as on a GPU
    try:
        words = refused(head=head)
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            train(head=head, virtual_ranks=None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "virtual_ranks=6: bits are the same only with deterministic kernels" in words
    assert "does not have a deterministic implementation" in words
    assert "leave --virtual_ranks out" in words


class Expanded(nn.Linear):
    """Has a buffer whose elements are all one."""

    def __init__(self, *, persistent):
        super().__init__(CLASSES, CLASSES)
        self.register_buffer("scale", torch.ones(1).expand(CLASSES), persistent=persistent)

    def forward(self, inputs):
        return super().forward(inputs) * self.scale


def test_a_buffer_with_several_elements_at_one_place_is_refused_by_name():
    words = refused(head=lambda: Expanded(persistent=True))
    assert ".scale' has several elements at one place in memory, as expand makes it" in words
    train(head=lambda: Expanded(persistent=False))  # no value of it is kept for a step


class Doubled(nn.Linear):
    """Has a forward pass of its own: torch compiles none of its own classes in place."""

    def forward(self, inputs):
        return 2 * super().forward(inputs)


def compiled():
    head = Doubled(CLASSES, CLASSES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its compiler
        head.compile(backend="eager", dynamic=False)
    return head


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of its compiler
def test_a_module_that_torch_would_stop_compiling_is_an_error():
    """On another number of processes the same batch would still meet a compiled module."""
    sizes = [range(1), range(2), range(3), range(4)]
    loading = {"batch_sampler": sizes, "shuffle": False, "batch_size": 1}
    given = {"head": compiled, "loading": loading}
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        words = refused(virtual_ranks=1, **given)
        train(virtual_ranks=None, **given)  # another run, to which it does not matter
    torch.compiler.reset()
    assert "virtual_ranks=1: torch has compiled a module for as many kinds of batches" in words
    assert "Give it batches of fewer sizes" in words


class Unsaved(Classifier):
    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        raise CheckpointError("cannot save /deterministic/run: the disk is full.")


def test_other_errors_with_that_word_stay_as_they_are():
    with pytest.raises(CheckpointError, match=r"^cannot save /deterministic/run"):
        train(Unsaved)


def test_another_number_of_processes_is_refused_with_those_that_work(ranks):
    for message in ranks.run(refused_on_ranks, world_size=2):
        assert "virtual_ranks=9 cannot be divided over 2 processes" in message
        assert "Start 1 or 3 or 9 processes" in message


def refused_on_ranks():
    return refused(virtual_ranks=9)


@pytest.mark.costly
def test_a_stream_that_is_another_one_on_each_rank_is_refused(ranks):
    for message in ranks.run(refused_stream, world_size=2):
        assert "the ranks do not read the same items" in message


def refused_stream():
    with pytest.raises(RankMismatchError) as caught:
        train(data=OfOneRank(points()), loading={"shuffle": False, "num_workers": 1})
    return str(caught.value)


@needs_torch("2.13", "a parameter has no grad_dtype")
def test_a_late_dtype_of_gradients_is_refused_by_name():
    assert "a gradient is torch.float64, and torch.float32 was expected" in refused(kind=LateDtype)


def test_what_cannot_work_is_refused_by_name():
    assert "check_parity" in refused(check_parity=2)
    assert "kernels by the times" in refused(compile=True, compile_mode="max-autotune")
    assert "a process sees first" in refused(compile=True, compile_using_dynamic_shape_tracing=True)
    assert "called loss.backward() past the Brain" in refused(kind=PastTheBrain, virtual_ranks=1)
    assert "optimizers_step() in the middle of a step" in refused(kind=PastTheBrain)
    assert "DividesItself divides itself" in refused(
        data=DividesItself(points()),
        loading={"shuffle": False},
    )
    divided = {"sampler": DistributedSampler(points(), 1, 0), "shuffle": False}
    assert "a DistributedSampler has divided already" in refused(loading=divided)
    assert "fit_batch changed gradients" in refused(kind=ClipsByItself)
    assert "has a part, SyncBatchNorm, that shares statistics" in refused(
        head=lambda: SyncBatchNorm(CLASSES)
    )
    assert "has a part, Embedding, that" in refused(
        head=lambda: nn.Embedding(CLASSES, CLASSES, sparse=True)
    )
    assert "nominal epochs" in refused(loading={"looped_nominal_epoch": 3})
    stream = {
        "data": Numbered(points()),
        "loading": {"shuffle": False},
        "loss_weighting": "batches",
    }
    assert "loss_weighting=batches does not work with a stream" in refused(**stream)


def test_an_optimizer_of_parameters_outside_of_modules_is_refused():
    outside = nn.Linear(CLASSES, CLASSES)

    class Outside(Classifier):
        def init_optimizers(self):
            self.optimizers_dict = {"outside": torch.optim.SGD(outside.parameters(), lr=0.1)}

    assert "'outside' has parameters that are not in modules" in refused(kind=Outside)
