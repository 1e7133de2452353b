"""The sizes of an optimizer step that are in use, beside those that the options say."""

from __future__ import annotations

import pytest

from ddpkit.data import Division
from ddpkit.errors import ConfigError
from ddpkit.run_opts import RunOptions
from ddpkit.training import Accumulation


def settled(world_size=1, virtual_ranks=None, **given):
    options = RunOptions(**given)
    accumulation = Accumulation(options)
    accumulation.choose_factor(Division(0, world_size, virtual_ranks))
    return accumulation, options


def test_before_it_is_settled_it_is_as_given():
    accumulation = Accumulation(RunOptions(global_batch_size=64, micro_batch_size=8))
    assert accumulation.in_use() == {
        "grad_accumulation_factor": 1,
        "global_batch_size": 64,
        "micro_batch_size": 8,
    }


@pytest.mark.parametrize(("virtual_ranks", "factor"), [(None, 4), (4, 4)])
def test_what_follows_is_no_option(virtual_ranks, factor):
    accumulation, options = settled(2, virtual_ranks, global_batch_size=64, micro_batch_size=8)
    assert accumulation.factor == factor
    assert options.grad_accumulation_factor == 1
    # at the next call of fit it contradicts nothing
    accumulation.choose_factor(Division(0, 2, virtual_ranks))
    assert accumulation.factor == factor


def test_what_a_recipe_assigns_later_counts():
    accumulation, options = settled(grad_accumulation_factor=2)
    options.grad_accumulation_factor = 3
    assert accumulation.factor == 3
    accumulation.choose_factor(Division(virtual_ranks=4))
    assert accumulation.factor == 12
    options.grad_accumulation_factor = 2
    assert accumulation.factor == 8


def test_sizes_that_were_found_are_used_until_the_recipe_assigns_others():
    accumulation, options = settled(global_batch_size=12, grad_accumulation_factor=2)
    accumulation.use({"micro_batch_size": 3, "grad_accumulation_factor": 4})
    assert (accumulation.factor, accumulation.micro_batch_size) == (4, 3)
    assert accumulation.choose_factor(Division()) == 4
    options.micro_batch_size = 6
    assert accumulation.micro_batch_size == 6
    with pytest.raises(ConfigError, match="grad_accumulation_factor=4 contradicts"):
        accumulation.choose_factor(Division())


def test_a_size_that_is_found_anew_takes_the_place_of_what_was_chosen():
    """Also where the factor is the one that was given: what had followed from it was another."""
    accumulation, _ = settled(global_batch_size=16, micro_batch_size=4)
    assert accumulation.factor == 4
    accumulation.use({"micro_batch_size": 16, "grad_accumulation_factor": 1})
    assert accumulation.factor == 1
