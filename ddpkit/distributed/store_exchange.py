"""Values that the ranks give each other over the store."""

from __future__ import annotations

from typing import TypeVar

from ddpkit.comm import Outcome, call_site, get_runtime, outside_frame
from ddpkit.distributed.main_only_code import ddp_prevent_block
from ddpkit.distributed.main_work import call_on_main

T = TypeVar("T")


def exchange(value: T, site: str | None = None) -> list[T]:
    """Give every rank the list of all ranks' values, in rank order, over the store.

    Unlike a collective it works between ranks that are about to discover that they differ: the
    sizes need not agree, and a rank that dies is noticed.

    Args:
        value: anything that pickles.
        site: names the call; None: the lines of code that lead to it do, which must be the same on
            every rank.

    Returns:
        One value per rank; ``[value]`` without a process group or in main-only code.

    Ranks: collective.

    Example:
        >>> exchange({"batches": 12})
        [{'batches': 12}]
    """
    if ddp_prevent_block():
        return [value]
    site = call_site(outside_frame()) if site is None else site
    mailbox = get_runtime().mailbox
    rank = mailbox.rank
    world = mailbox.world_size

    # Rank 0 collects and hands out the list: two messages for each rank, instead of one to each.
    def gather() -> list[T]:
        values = [value]
        for other in range(1, world):
            own_site = f"from rank {other} {site}"
            values.append(
                mailbox.read(
                    own_site,
                    mailbox.next_count(own_site),
                    poster=other,
                    readers=1,
                ).value
            )
        return values

    if rank != 0:
        own_site = f"from rank {rank} {site}"
        mailbox.post(
            own_site,
            mailbox.next_count(own_site),
            Outcome(value),
            readers=1,
        )
    return call_on_main(gather, f"all {site}") or []
