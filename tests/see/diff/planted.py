"""Differences between two runs that are planted, and what ``diff`` has to say of each.

    python -m tests.see.diff.planted --number 50 --seed 1

Each is a run beside one in which nothing is changed: the content of a sample, the order of samples,
a dropout, a kernel of the forward or of the backward pass (its result is other by one part in 4000,
or in a million), a bit of a gradient, a weight or a state, an option, the label of a version.
``diff`` has to name the optimizer step and what of it differs first, with its module.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from ddpkit import Part
from ddpkit.brain import Brain
from ddpkit.parts import hash_chain
from ddpkit.see import run_diff
from ddpkit.train_logger import set_run_log
from ddpkit.types import Stage
from tests.recipes import QUIET

SAMPLES = 24
BATCH = 2
STEPS = SAMPLES // BATCH
WIDTH = 8
MODULES = ("net.0", "net.3", "head")


@dataclass(frozen=True)
class Planted:
    """A difference, and what ``diff`` has to say.

    Attributes:
        kind: of the difference.
        step: the optimizer step at which it is planted.
        first: what of the step has to be named; empty: the runs are equal.
        module: likewise; empty: any.
        besides: what has to be named besides; empty: nothing.
        place: the module that is changed, or a number that is drawn.
    """

    kind: str
    step: int = 1
    first: str = ""
    module: str = ""
    besides: str = ""
    place: object = None


def flip(tensor, bit):
    """Flip a bit of a tensor's first number."""
    tensor.view(-1).view(torch.int32)[0] ^= 1 << bit


class Flips(Part):
    """Flips a bit in one step, before it is hashed."""

    def __init__(self, planted):
        self.planted = planted

    def _parameter(self, brain):
        return brain.raw_modules.get_submodule(self.planted.module).weight

    def on_gradients(self, brain):
        if self.planted.kind == "gradient bit" and brain.optimizer_step == self.planted.step - 1:
            flip(self._parameter(brain).grad, self.planted.place)

    def after_step(self, brain):
        is_here = self.planted.kind in {"weight bit", "state bit"}
        if not is_here or brain.optimizer_step != self.planted.step:
            return
        parameter = self._parameter(brain)
        if self.planted.kind == "weight bit":
            flip(parameter.data, self.planted.place)
        elif self.planted.kind == "state bit":
            flip(brain.optimizer.state[parameter]["exp_avg"], self.planted.place)


class OtherBackward(torch.autograd.Function):
    """Multiplies with weights; its backward pass adds the samples up one by one, as another kernel
    may do.
    """

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        one_by_one = torch.zeros_like(weight)
        for sample in range(len(inputs)):
            one_by_one += torch.outer(gradient[sample], inputs[sample]) * (1 + 2**-20)
        return gradient @ weight, one_by_one


class Recipe(Brain):
    """A small classifier with dropout; in one of its steps something is other."""

    planted = Planted("nothing")

    def _is_planted(self, kind, stage):
        is_now = self.optimizer_step == self.planted.step - 1 and stage is Stage.TRAIN
        return is_now and self.planted.kind == kind

    def _linear(self, layer, inputs, stage, name):
        is_here = self.planted.place == name
        if is_here and self._is_planted("forward kernel", stage):
            in_other_order = (inputs.flip(-1).unsqueeze(-2) * layer.weight.flip(-1)).sum(-1)
            product = in_other_order * (1 + 2**-12)
        elif is_here and self._is_planted("backward kernel", stage):
            product = OtherBackward.apply(inputs, layer.weight)
        else:
            product = inputs @ layer.weight.T
        return product + layer.bias

    def compute_forward(self, batch, stage):
        net = self.modules.net
        hidden = torch.tanh(self._linear(net[0], batch[0], stage, "net.0"))
        rate = 0.35 if self._is_planted("dropout", stage) else 0.2
        hidden = nn.functional.dropout(hidden, rate, training=stage is Stage.TRAIN)
        hidden = torch.tanh(self._linear(net[3], hidden, stage, "net.3"))
        return self._linear(self.modules.head, hidden, stage, "head")

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.cross_entropy(predictions, batch[1])


def points():
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, WIDTH, generator=draw)
    return list(zip(inputs, torch.randint(0, 4, (SAMPLES,), generator=draw), strict=True))


def modules():
    torch.manual_seed(5)
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    net = nn.Sequential(first, nn.Tanh(), nn.Dropout(0.2), second, nn.Tanh())
    return {"net": net, "head": nn.Linear(WIDTH, 4)}


def train(folder, planted=None, **options):
    """Train once, with a difference or without one; the records are in the folder."""
    planted = planted or Planted("nothing")
    data = points()
    order = list(range(SAMPLES))
    if planted.kind == "content of a sample":
        inputs, label = data[(planted.step - 1) * BATCH]
        data[(planted.step - 1) * BATCH] = (inputs * (1 + 2**-10), label)
    elif planted.kind == "order of samples":
        at = (planted.step - 1) * BATCH
        order[at], order[-1] = order[-1], order[at]
    elif planted.kind == "option":
        options |= dict([planted.place])
    torch.manual_seed(9)
    set_run_log(Path(folder) / "metrics.jsonl")
    kind = type("Planted", (Recipe,), {"planted": planted})
    brain = kind(
        modules(),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        run_opts={**QUIET, "hash_every": 1, **options},
        parts=[Flips(planted)],
    )
    labels = hash_chain.labels

    def other_labels(device):
        return labels(device) | dict([planted.place])

    changed = other_labels if planted.kind == "label" else labels
    with mock.patch.object(hash_chain, "labels", changed):
        brain.fit([1], data, train_loader_kwargs={"batch_size": BATCH, "sampler": order})
    set_run_log(None)
    return folder


OPTIONS = (
    (("max_grad_norm", 0.25), "optimizer"),
    (("precision", "bf16"), "loss"),
    (("grad_accumulation_factor", 2), "samples"),
    (("remove_vector_weight_decay", True), "settings"),
)
LABELS = (("torch", "2.0.0"), ("threads", 64), ("device", "another GPU"), ("processor", "AVX512"))


def draw(kind, drawn):
    """Draw a difference of a kind."""
    step = drawn.randint(2, STEPS - 1)
    module = drawn.choice(MODULES)
    if kind in {"content of a sample", "dropout"}:
        return Planted(kind, step, "loss")
    if kind == "order of samples":
        return Planted(kind, step, "samples")
    if kind == "forward kernel":
        return Planted(kind, step, "loss", place=module)
    if kind == "backward kernel":
        return Planted(kind, step, "gradients", module, place=module)
    if kind == "option":
        place, first = drawn.choice(OPTIONS)
        return Planted(kind, 1, first, besides=f"--{place[0]}", place=place)
    if kind == "label":
        place = drawn.choice(LABELS)
        return Planted(kind, besides=place[0], place=place)
    first = {"gradient bit": "gradients", "weight bit": "weights", "state bit": "optimizer"}[kind]
    return Planted(kind, step, first, module, place=drawn.randint(0, 29))  # bit 30: infinity


KINDS = (
    "content of a sample",
    "order of samples",
    "dropout",
    "forward kernel",
    "backward kernel",
    "gradient bit",
    "weight bit",
    "state bit",
    "option",
    "label",
)


def told(plain, other):
    """Return what ``diff`` says of two runs, as plain values, and its exit status."""
    lines = []
    status = run_diff([str(plain), str(other)], lines.append, as_json=True)
    return json.loads("\n".join(lines)), status


def is_named(planted, found, status):
    """Say whether ``diff`` has named a difference: its step, what is first, and what is besides."""
    besides = [row["name"] for row in found["besides"]]
    if planted.besides not in {"", *besides}:
        return False
    if not planted.first:
        return found["equal"] and status == 0
    modules = found["modules"].get(planted.first, [])
    return (
        status == 1
        and found["exact"]
        and found["step"] == planted.step
        and found["first"] == planted.first
        and (not planted.module or modules == [planted.module])
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    named = Counter()
    tried = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = train(folder / "plain")
        for number in range(options.number):
            planted = draw(KINDS[number % len(KINDS)], drawn)
            found, status = told(plain, train(folder / f"{number}", planted))
            tried[planted.kind] += 1
            if is_named(planted, found, status):
                named[planted.kind] += 1
            else:
                print(
                    f"NOT NAMED: {planted}: {found['step']}, {found['first']}, {found['modules']}"
                )
    for kind in KINDS:
        print(f"{kind:22} {named[kind]} of {tried[kind]} named")
    print(f"{'all':22} {named.total()} of {tried.total()} named")
    sys.exit(named != tried)


if __name__ == "__main__":
    main()
