"""Ranks, the process group, main-only work and the few collectives that recipes use.

Each name is loaded when it is first used, with what it needs: who asks for a rank alone loads no
store, no watchdog and no launcher.
"""

from __future__ import annotations

from ddpkit import _names_of_stub

__all__ = [
    "ReduceOp",
    "alone",
    "control_group",
    "ddp_all_reduce",
    "ddp_barrier",
    "ddp_broadcast",
    "ddp_init_group",
    "ddp_prevent_block",
    "environment_without_launch",
    "exchange",
    "gather_objects",
    "gather_with_gradient",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "if_main_process",
    "is_distributed_initialized",
    "is_local_rank_zero",
    "main_process_only",
    "once_per_node",
    "rank_prefixed_message",
    "require_all_ranks",
    "run_on_main",
    "run_once_per_node",
    "start_sum_over_ranks",
    "sum_exactly",
    "sum_over_ranks",
]

__getattr__ = _names_of_stub(__name__)  # of __init__.pyi; each is loaded on first use


def __dir__() -> list[str]:
    """List the public names besides what is loaded already."""
    return sorted({*globals(), *__all__})
