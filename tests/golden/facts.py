"""What is compared of a training: hashes of the bits, and numbers for a reader and for machines
with other kernels.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch


def facts_of_training(brain):
    """Return what a training has come to on this rank.

    Args:
        brain: with its trace.
    """
    modules = brain.raw_modules
    weights = torch.cat([flat(one) for one in modules.parameters()])
    buffers = [flat(one) for one in modules.buffers()]
    trace = np.array(brain.trace, dtype=np.float64)
    optimizers = brain.optimizers_dict
    return {
        "steps": brain.optimizer_step,
        "losses": len(trace),
        "trace": hash_of_trace(trace),
        "weights": hash_of([torch.cat([weights, *buffers])]),
        "last_losses": [readable(loss) for loss in trace[-3:]],
        "norm": float(weights.norm()),
        "optimizers": {name: hash_of(state_of(one)) for name, one in sorted(optimizers.items())},
        "rates": [group["lr"] for one in optimizers.values() for group in one.param_groups],
        "average": None if brain.ema is None else hash_of_average(brain.ema),
    }


def every_loss(brain):
    return [readable(loss) for loss in brain.trace]


def facts_of_result(result, test_loss, outputs):
    """Return what calls of fit, evaluate and predict have returned."""
    return {
        "reason": result.reason,
        "logged": result.logged,
        "test_loss": readable(test_loss),
        "outputs": hash_of(outputs),
    }


def flat(tensor):
    """Return a whole tensor, of which this rank may have a part, as one row of float64."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().flatten().double()


def own_part(tensor):
    """Return what this rank has of a tensor, as one row of float64."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach().flatten().double()


def state_of(optimizer):
    """Return the tensors that this rank keeps in an optimizer, in the order of its parameters."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    states = [optimizer.state[one] for one in parameters if one in optimizer.state]
    return [
        own_part(value)
        for state in states
        for _, value in sorted(state.items())
        if isinstance(value, torch.Tensor)
    ]


def hash_of_average(average):
    state = average.state_dict()
    return hash_of([own_part(value) for _, value in sorted(state.items())])


def hash_of(tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().double().contiguous().numpy().tobytes())
    return digest.hexdigest()


def hash_of_trace(trace):
    trace = np.where(np.isnan(trace), np.nan, trace)  # one of the many bit patterns
    return hashlib.sha256(trace.tobytes()).hexdigest()


def readable(number):
    """Return a number as JSON has it: what is not finite as a word, which is equal to itself."""
    number = float(number)
    return number if math.isfinite(number) else str(number)
