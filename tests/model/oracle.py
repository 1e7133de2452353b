"""What every training must come to: a plain loop of torch on one process, with no ddpkit in it.

It is given the rows of each batch of each optimizer step, and knows nothing of ranks. It is as
short as it can be, so that a reader believes it.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

STATISTICS = ("running_mean", "running_var")


def train_plainly(training, net, optimizers, epochs, rows, others):  # noqa: C901, PLR0912 -- read whole
    """Train; return the reported losses, the optimizer steps, the weights and their average.

    Args:
        training: the numbers, as of :class:`tests.model.training.Training`.
        net: a module.
        optimizers: of its parameters.
        epochs: for each epoch its optimizer steps; for each step its batches, of numbers of rows.
        rows: inputs, targets and tokens, with a row for each sample.
        others: likewise, of the validation.
    """
    schedule = None
    if training.schedule == "plateau":
        schedule = ReduceLROnPlateau(optimizers[0], patience=0, threshold=0.5)
    elif training.schedule:
        schedule = LambdaLR(optimizers[0], training.rate(epochs))
    reported = []
    average = None
    steps = 0
    for number, epoch in enumerate(epochs, 1):
        if number == 2 and training.thaws:
            net.upper[0].requires_grad_(True)
            average = average and averaged_part(net) | average
        loss_sum = counted = 0.0
        windows_done = 0
        for window in epoch:
            weights = [training.weights(rows[2][batch]) for batch in window]
            total = float(sum(weight.sum() for weight in weights))
            for batch, weight in zip(window, weights, strict=True):
                losses = (net(rows[0][batch]) - rows[1][batch]).square().squeeze(1)
                ((losses * weight).sum() / (total or 1.0)).backward()
                loss_sum += float((losses.detach() * weight).sum())
            counted += total
            if total:
                if training.max_norm:
                    nn.utils.clip_grad_norm_(net.parameters(), training.max_norm)
                for optimizer in optimizers:
                    step_at_scaled_rate(optimizer, training.rate_scale)
                steps += 1
                average = moved(average, averaged_part(net), training.ema_decay)
                if training.schedule == "step":
                    schedule.step()
            net.zero_grad()
            windows_done += 1
            if steps == training.step_limit:
                break
        is_cut = windows_done < len(epoch) or (training.is_stream and steps == training.step_limit)
        if training.schedule == "epoch" and not is_cut:  # where a stream ends nobody knows
            schedule.step()
        shown = copy.deepcopy(net).eval()
        if training.evaluates_average and average:
            shown.load_state_dict(average, strict=False)
        errors = (shown(others[0]) - others[1]).square().squeeze(1).detach()
        amounts = others[2].double() if training.counts_tokens else torch.ones_like(errors)
        valid_loss = float((errors * amounts).sum() / amounts.sum())
        reported.append((loss_sum / counted, valid_loss))
        if training.schedule == "plateau":
            schedule.step(valid_loss)
        if steps == training.step_limit:
            break
    return reported, steps, net.state_dict(), average


def step_at_scaled_rate(optimizer, scale):
    before = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] *= scale
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = rate


def averaged_part(net):
    """Copy what an average of weights is made of: trained parameters and running statistics."""
    named = [(name, value) for name, value in net.named_parameters() if value.requires_grad]
    named += [(name, value) for name, value in net.named_buffers() if name.endswith(STATISTICS)]
    return {name: value.detach().clone() for name, value in named}


def moved(average, weights, decay):
    """Return the moving average one step later; it begins with the first weights."""
    if average is None or decay is None:
        return weights if decay is not None else None
    return {name: decay * average[name] + (1 - decay) * weights[name] for name in weights}
