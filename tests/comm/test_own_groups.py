"""Each use of collectives beside the gradients has a process group of its own, made once."""

from __future__ import annotations

import torch.distributed as dist

from ddpkit.comm import control_group, get_runtime
from ddpkit.compat import all_groups

# a backend of its own makes another group, also where it is that of the default group
USES = [("statistics", "gloo"), ("statistics", None), ("sums", None)]


def groups_of_uses():
    """Return whether each use gets its group again, and how many groups were made."""
    before = set(all_groups())
    first, again = (
        [control_group(), *(get_runtime().own_group(*use) for use in USES)] for _ in range(2)
    )
    made = set(all_groups()) - before
    return first == again, made == set(first), len(made)


def test_each_use_has_a_group_of_its_own_which_is_made_once(ranks):
    assert ranks.run(groups_of_uses, world_size=2) == [(True, True, 4)] * 2


def group_after_its_end():
    own_group = get_runtime().own_group
    first = own_group("sums")
    name = first.group_name
    dist.destroy_process_group(first)
    del first
    second = own_group("sums")
    return second.group_name != name, second in all_groups()


def test_a_group_that_was_destroyed_is_made_anew(ranks):
    assert ranks.run(group_after_its_end, world_size=2) == [(True, True)] * 2
