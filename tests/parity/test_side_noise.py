"""Noise that is switched off: every stand-in gives the same twice, in the shape and dtype of the
real thing.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ddpkit.parity.side import without_noise

HALF = torch.full((4, 5), 0.5)

CASES = {
    "rand": (lambda: torch.rand(4, 5), 0.5),
    "rand_like": (lambda: torch.rand_like(HALF), 0.5),
    "randn": (lambda: torch.randn(4, 5, dtype=torch.float64), 0.0),
    "randn_like": (lambda: torch.randn_like(HALF), 0.0),
    "randint": (lambda: torch.randint(7, (4, 5)), 0),
    "randint from": (lambda: torch.randint(3, 7, (4, 5)), 3),
    "randint named": (lambda: torch.randint(low=3, high=7, size=(4, 5)), 3),
    "randint half named": (lambda: torch.randint(3, high=7, size=(4, 5)), 3),
    "randint_like": (lambda: torch.randint_like(HALF, 7), 0),
    "randint_like from": (lambda: torch.randint_like(HALF, 3, 7), 3),
    "bernoulli": (lambda: torch.bernoulli(HALF + 0.2), 1.0),
    "bernoulli method": ((HALF - 0.2).bernoulli, 0.0),
    "bernoulli with p": (lambda: HALF.bernoulli(0.7), 1.0),
    "bernoulli in place, plain": (lambda: HALF.clone().bernoulli_(), 0.0),
    "bernoulli in place": (lambda: HALF.clone().bernoulli_(0.2), 0.0),
    "bernoulli in place by tensor": (lambda: HALF.clone().bernoulli_(HALF + 0.2), 1.0),
    "normal": (lambda: torch.normal(HALF, HALF), 0.0),
    "normal of a size": (lambda: torch.normal(2.0, 1.0, (4, 5)), 0.0),
    "normal in place": (lambda: HALF.clone().normal_(2.0, 1.0), 0.0),
    "uniform in place": (lambda: HALF.clone().uniform_(2, 4), 0.5),
    "uniform in place, plain": (lambda: HALF.clone().uniform_(), 0.5),
    "dropout": (lambda: F.dropout(HALF, 0.9), 0.5),
    "dropout2d": (lambda: F.dropout2d(HALF[None, :, :, None], 0.9)[0, :, :, 0], 0.5),
    "alpha_dropout": (lambda: F.alpha_dropout(HALF, 0.9, training=True), 0.5),
    "torch.dropout": (lambda: torch.dropout(HALF, 0.9, train=True), 0.5),
    "rsample": (lambda: torch.distributions.Normal(2.0 + 0 * HALF, 1.0).rsample(), 2.0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_random_function_returns_a_fixed_value(case):
    draw, value = CASES[case]
    noisy = draw()
    with without_noise(nn.Identity()):
        calm = draw()
    assert (calm.shape, calm.dtype, calm.device) == (noisy.shape, noisy.dtype, noisy.device)
    assert torch.equal(calm, torch.full_like(calm, value))
    assert not torch.equal(noisy, calm) or "bernoulli" in case or "randint" in case


def test_permutations_change_nothing():
    with without_noise(nn.Identity()):
        assert torch.randperm(5).tolist() == [0, 1, 2, 3, 4]


def test_gradients_flow_through_what_is_left():
    rows = HALF.clone().requires_grad_()
    with without_noise(nn.Identity()):
        (F.dropout(rows) * torch.rand(5, requires_grad=True) + torch.randn(5)).sum().backward()
    assert torch.equal(rows.grad, HALF)


@pytest.mark.parametrize("positional", [False, True])
def test_attention(positional):
    heads = torch.randn(2, 3, 4, 5)
    calls = lambda p: (
        F.scaled_dot_product_attention(heads, heads, heads, None, p)
        if positional
        else F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p)
    )
    with without_noise(nn.Identity()):
        assert torch.equal(calls(0.9), calls(0.0))


def test_layers_that_are_computed_again_in_the_backward_pass():
    """No function is looked at there: the layers themselves are switched off."""
    rows = torch.ones(4, 5, requires_grad=True)
    drop = nn.Dropout(0.5)
    with without_noise(drop):
        checkpoint(
            lambda rows: drop(rows).sin().square(),
            rows,
            use_reentrant=False,
        ).sum().backward()
    found = rows.grad
    rows.grad = None
    rows.sin().square().sum().backward()
    assert torch.equal(found, rows.grad)


def test_layers():
    layers = nn.ModuleDict(
        {
            "drop": nn.Dropout(0.1),
            "off": nn.Dropout(0.0),
            "held": nn.Dropout(0.1).eval(),
            "heads": nn.MultiheadAttention(4, 2, dropout=0.2),
            "cell": nn.GRU(4, 4, num_layers=2, dropout=0.3),
        }
    )
    rows = torch.randn(2, 3, 4)

    def once():
        return torch.stack(
            [layers["drop"](rows), layers["heads"](rows, rows, rows)[0], layers["cell"](rows)[0]]
        )

    assert not torch.equal(once(), once())
    with without_noise(layers):
        assert torch.equal(once(), once())
    assert (layers["drop"].p, layers["heads"].dropout, layers["cell"].dropout) == (0.1, 0.2, 0.3)
