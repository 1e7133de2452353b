"""The golden cases: small trainings, each with one or two things that a change could break."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from tests.golden import recipes
from tests.golden.data import make_data

WORLD_SIZES = (1, 2, 3)


@dataclass(frozen=True)
class Case:
    """One training; everything else is the same in all of them.

    Attributes:
        dtype: of data and weights.
        data: the kind of training data, as ``make_data`` knows it.
        recipe: the Brain.
        modules: makes the modules from the case.
        norm: whether the net has a BatchNorm layer.
        dropout: of the net.
        optimizer: a word for what ``opt_class`` makes.
        scheduler: the ``scheduler_class``.
        options: of the run.
        loader: for the training loader.
        epochs: how many.
        kill_at: optimizer steps after which the killed run ends, by number of ranks; two thirds of
            all where none is given.
        alone: whether one rank is a process without a process group.
        any_ranks: whether all numbers of ranks give the same bits.
        rounding: how far losses may lie apart on a machine with other kernels, relatively.
    """

    dtype: torch.dtype = torch.float32
    data: str = "table"
    recipe: type = recipes.Golden
    modules: Callable[[Case], dict[str, torch.nn.Module]] = recipes.one_net
    norm: bool = False
    dropout: float = 0.0
    optimizer: str = "sgd"
    scheduler: Callable[..., Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    epochs: int = 3
    kill_at: dict[int, int] = field(default_factory=dict)
    alone: bool = False
    any_ranks: bool = False
    rounding: float = 1e-3

    def make_modules(self):
        return {name: module.to(self.dtype) for name, module in self.modules(self).items()}

    def make_data(self):
        return make_data(self.data, self.dtype)

    def loader_kwargs(self):
        kwargs = {"num_workers": 0}
        if "global_batch_size" not in self.options:
            kwargs["batch_size"] = 3
        if "stream" not in self.data:
            kwargs["shuffle"] = True
        return kwargs | self.loader

    def optimize(self, parameters):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


FLOAT64 = torch.float64
# AdamW makes whole steps of what rounding leaves as the gradient of a bias before a BatchNorm
# layer, in float32.
ROUNDING_OF_BIASES = 0.5

CASES = {
    "plain": Case(epochs=4, kill_at={1: 23, 2: 11, 3: 7}),
    "norm-dropout-clipping": Case(
        norm=True,
        dropout=0.2,
        options={"max_grad_norm": 0.1},
        epochs=4,
        kill_at={1: 8, 2: 4, 3: 4},
    ),
    "float64-accumulation": Case(
        FLOAT64,
        norm=True,
        optimizer="adamw",
        options={"grad_accumulation_factor": 3, "ema_decay": 0.9},
        epochs=4,
        kill_at={1: 8, 2: 4, 3: 4},
    ),
    "global-batch": Case(
        FLOAT64,
        dropout=0.1,
        options={"global_batch_size": 7, "micro_batch_size": 2},
        epochs=4,
        kill_at={1: 13, 2: 13, 3: 13},
    ),
    "sum-and-count": Case(
        FLOAT64,
        recipe=recipes.SumsAndCounts,
        options={"grad_accumulation_factor": 2},
        epochs=4,
        kill_at={1: 8, 2: 4, 3: 4},
    ),
    "stream": Case(
        FLOAT64,
        data="stream",
        options={"grad_accumulation_factor": 2},
        epochs=4,
        kill_at={1: 9, 2: 4, 3: 4},
    ),
    "augmentation-in-workers": Case(
        data="noisy",
        optimizer="adamw",
        loader={"num_workers": 2},
        epochs=4,
        kill_at={1: 8, 2: 4, 3: 4},
    ),
    # ------------------------------------------------------------------------------ strategies
    "one-process": Case(dropout=0.2, options={"grad_accumulation_factor": 2}, alone=True),
    "zero1": Case(optimizer="adamw", options={"strategy": "zero1", "grad_accumulation_factor": 2}),
    "fsdp": Case(
        norm=True,
        optimizer="adamw",
        options={"strategy": "fsdp", "fsdp_blocks": ["Linear"], "ema_decay": 0.8},
        rounding=ROUNDING_OF_BIASES,
    ),
    "virtual-ranks": Case(
        norm=True,
        dropout=0.2,
        options={"virtual_ranks": 6},
        loader={"batch_size": 2, "drop_last": True},
        any_ranks=True,
    ),
    "local-sgd": Case(
        norm=True,
        optimizer="adamw",
        options={
            "ddp_comm_hook": "post_local_sgd",
            "local_sgd_start": 3,
            "local_sgd_period": 2,
            "sync_batchnorm": False,
        },
        loader={"batch_size": 4, "drop_last": True},
        rounding=ROUNDING_OF_BIASES,
    ),
    # ----------------------------------------------------------------------- gradients on their way
    "gradients-in-bf16": Case(options={"ddp_comm_hook": "bf16"}, rounding=0.05),
    "powersgd": Case(options={"ddp_comm_hook": "powersgd", "start_powersgd_iter": 3}),
    "unused-parameters": Case(
        FLOAT64,
        recipe=recipes.Branches,
        modules=recipes.two_branches,
        options={"find_unused_parameters": True},
    ),
    "batchnorm-of-each-process": Case(
        FLOAT64,
        norm=True,
        options={
            "sync_batchnorm": False,
            "loss_weighting": "batches",
            "grad_accumulation_factor": 2,
        },
        loader={"batch_size": 4, "drop_last": True},
    ),
    "bf16-autocast": Case(
        norm=True,
        options={"precision": "bf16", "eval_precision": "bf16"},
        rounding=0.3,
    ),
    # ------------------------------------------------------------------------------ steps
    "evaluated-average": Case(
        FLOAT64,
        norm=True,
        dropout=0.1,
        options={"ema_decay": 0.7, "evaluate_ema": True, "grad_accumulation_factor": 2},
    ),
    "schedule-and-lr-scaling": Case(
        FLOAT64,
        scheduler=functools.partial(OneCycleLR, max_lr=0.1),
        options={"lr_scaling": "linear", "reference_batch_size": 5},
    ),
    "plateau-and-vectors": Case(
        FLOAT64,
        norm=True,
        optimizer="adamw",
        scheduler=functools.partial(ReduceLROnPlateau, patience=0, threshold=0.5),
        options={
            "scheduler_every": "epoch",
            "remove_vector_weight_decay": True,
            "lr_scaling": "sqrt",
            "reference_batch_size": 2,
        },
    ),
    "frozen-and-named-groups": Case(
        FLOAT64,
        recipe=recipes.Unfreezing,
        modules=recipes.frozen_first_layer,
    ),
    "two-optimizers": Case(
        FLOAT64,
        recipe=recipes.Adversaries,
        modules=recipes.generator_and_discriminator,
        options={"grad_accumulation_factor": 2, "ema_decay": 0.8},
    ),
    "skipped-steps": Case(data="spoilt"),
    "auto-micro-batch": Case(
        FLOAT64,
        modules=recipes.small_memory,
        dropout=0.1,
        options={"global_batch_size": 14, "auto_micro_batch": True},
    ),
    # ------------------------------------------------------------------------------ data
    "tokens-of-a-stream-in-workers": Case(
        FLOAT64,
        data="divided stream",
        recipe=recipes.Tokens,
        options={"grad_accumulation_factor": 2},
        loader={"num_workers": 2},
    ),
}
