"""The run options of DDP, by torch's names, and which of them do not go together."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ddpkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass(frozen=True)
class DDPOptions:
    """What a run says of DDP. Each name is that of a run option; None: ddpkit decides.

    Attributes:
        find_unused_parameters: a step may leave parameters out, others in each step.
        static_graph: every step uses the same parameters; those that it leaves out stay out.
        gradient_as_bucket_view: gradients are views of DDP's buckets. None: unless a recipe has its own ``fit_batch``,
            which may keep a gradient, while a view is overwritten by the next backward pass.
        bucket_cap_mb: size of a bucket in MiB; None: torch's, 25.
        broadcast_buffers: whether buffers are sent from rank 0 before each training forward pass. None: where a
            module has buffers that may drift apart.
        sync_batchnorm: whether a BatchNorm normalises over the rows of all ranks; None: it does.
        ddp_comm_hook: how gradients travel: as ``"fp16"``, ``"bf16"`` or ``"powersgd"``; or ``"post_local_sgd"``: in
            the first steps alone. None: as they are.
        matrix_approximation_rank: of PowerSGD.
        start_powersgd_iter: optimizer steps before PowerSGD begins.
        local_sgd_start: optimizer steps before each rank steps with its own gradients; None: 0.
        local_sgd_period: after how many of these weights are averaged.

    Raises:
        ConfigError: options that do not go together.

    Ranks: local.

    Example:
        >>> DDPOptions(find_unused_parameters=True, static_graph=True)
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: static_graph=True and find_unused_parameters=True contradict each other: ...
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool | None = None
    bucket_cap_mb: float | None = None
    broadcast_buffers: bool | None = None
    sync_batchnorm: bool | None = None
    ddp_comm_hook: str | None = None
    matrix_approximation_rank: int = 1
    start_powersgd_iter: int = 1000
    local_sgd_start: int | None = None
    local_sgd_period: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> DDPOptions:
        """Take them from the options of a run.

        Args:
            options: with all names of the fields.
        """
        return cls(**{field.name: options[field.name] for field in fields(cls)})

    def __post_init__(self) -> None:
        if self.static_graph and self.find_unused_parameters:
            raise ConfigError(
                "static_graph=True and find_unused_parameters=True contradict each other: the one says that every step "
                "uses the same parameters, the other that steps differ. Give --static_graph alone where a parameter is "
                "used in each step or in none, else --find_unused_parameters alone."
            )

    def make_hook(self) -> Callable[..., Any] | None:
        """Return what averages a bucket of gradients of one module; None where gradients travel as they are."""
        if self.ddp_comm_hook in {None, "post_local_sgd"}:
            return None
        if self.ddp_comm_hook == "powersgd":
            from ddpkit.strategies.powersgd import PowerSGD

            return PowerSGD(self.matrix_approximation_rank, self.start_powersgd_iter)
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        half = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        return functools.partial(half[self.ddp_comm_hook], None)  # type: ignore[arg-type]  # torch's default group

    @property
    def averages_gradients(self) -> bool:
        """Whether gradients are averaged over the ranks in any step."""
        return self.ddp_comm_hook != "post_local_sgd" or bool(self.local_sgd_start)
