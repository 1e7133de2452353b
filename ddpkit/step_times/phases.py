"""The phases of an optimizer step: names of what is measured, in the order in which it happens.

A step is a window of accumulation. Of each phase the seconds on one rank are measured, added up
over the batches of the window.

``data``
    waiting for the next batch.
``move``
    from the beginning of ``fit_batch`` until the model is first called: the batch goes to the
    device, and what the recipe does before its model.
``forward``
    from there to the beginning of the backward pass.
``backward``
    the rank's own part of the backward pass: up to the moment at which its gradients are there.
``exchange``
    waiting for the other ranks: the rest of the backward pass, what a strategy averages by itself,
    and statistics of BatchNorm that are shared.
``optimizer``
    clip, step and zero.
``other``
    the rest of the step.

The sum of all phases is the time of the step.
"""

from __future__ import annotations

DATA = "data"
MOVE = "move"
FORWARD = "forward"
BACKWARD = "backward"
EXCHANGE = "exchange"
OPTIMIZER = "optimizer"
OTHER = "other"

#: All of them, in order.
PHASES: tuple[str, ...] = (DATA, MOVE, FORWARD, BACKWARD, EXCHANGE, OPTIMIZER, OTHER)

#: The name of their sum.
STEP = "step"
