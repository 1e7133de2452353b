"""How far training on several processes departs from one process, with ddpkit and with the usual
loop.

    python -m benchmarks.same_answer

Trains a small network for some epochs on 1, 2, 3 and 4 gloo processes with the same joined batch
and prints the largest difference of a weight, and of a reported loss, from one process. The usual
loop is what many recipes do by hand: torch's DistributedSampler, which pads the last batches by
repetition; DDP; every batch's mean loss divided by the accumulation factor; an incomplete last
window left out; the mean of the batches' losses on rank 0 as the reported one. Both take the
samples in the order of the dataset, so that only the arithmetic differs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddpkit.brain import Brain
from tests.rank_pool import RankPool

JOINED = 12
RATE = 0.05


@dataclass(frozen=True)
class Setting:
    """What is trained."""

    name: str
    samples: int = 96
    factor: int = 1
    batch_norm: bool = False
    dtype: torch.dtype = torch.float64


SETTINGS = [
    Setting("even"),
    Setting("a remainder of 5", samples=101),
    Setting("accumulation 3, a remainder of 5", samples=101, factor=3),
    Setting("BatchNorm, a remainder of 5", samples=101, batch_norm=True),
    Setting("fewer samples than a batch", samples=7),
    Setting("the same in float32", samples=101, factor=3, dtype=torch.float32),
]


def make(setting: Setting) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(16)] if setting.batch_norm else []
    net = nn.Sequential(
        nn.Linear(8, 16, bias=not setting.batch_norm),
        *middle,
        nn.Tanh(),
        nn.Linear(16, 4),
    )
    inputs = torch.randn(setting.samples, 8)
    targets = torch.randint(0, 4, (setting.samples,))
    return net.to(setting.dtype), list(zip(inputs.to(setting.dtype), targets, strict=True))


class Classifier(Brain):
    """Keeps the training losses it is told."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.cross_entropy(predictions, batch[1])

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.told = [*getattr(self, "told", []), stage_loss]


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([value.detach().double().flatten() for value in net.state_dict().values()])


def with_ddpkit(
    setting: Setting,
    world_size: int,
    epochs: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    net, data = make(setting)
    options = {
        "device": "cpu",
        "noprogressbar": True,
        "max_grad_norm": 0,
        "grad_accumulation_factor": setting.factor,
    }
    brain = Classifier(
        {"net": net},
        lambda those: torch.optim.SGD(those, lr=RATE, momentum=0.9),
        run_opts=options,
    )
    brain.fit(range(1, epochs + 1), data, train_loader_kwargs={"batch_size": JOINED // world_size})
    return flat(brain.raw_modules), torch.tensor(brain.told, dtype=torch.float64)


def with_the_usual_loop(
    setting: Setting,
    world_size: int,
    epochs: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    net, data = make(setting)
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    model = DistributedDataParallel(net) if world_size > 1 else net
    sampler = DistributedSampler(data, world_size, rank, shuffle=False)
    loader = DataLoader(data, batch_size=JOINED // world_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    told = []
    for _ in range(epochs):
        losses = []
        for number, (inputs, targets) in enumerate(loader, 1):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            (loss / setting.factor).backward()
            losses.append(loss.item())
            if number % setting.factor == 0:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()
        told.append(sum(losses) / len(losses))
    return flat(net), torch.tensor(told, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    worlds = (2, 3, 4)
    print(
        f"largest difference from one process after {epochs} epochs: of a weight / of a reported "
        "training loss"
    )
    print(f"{'':44}" + "".join(f"{f'{world} processes':>20}" for world in worlds))
    with RankPool() as pool:
        for setting in SETTINGS:
            for name, train in (("ddpkit", with_ddpkit), ("usual", with_the_usual_loop)):
                weights, losses = train(setting, 1, epochs)
                row = ""
                for world in worlds:
                    found, told = pool.run(train, setting, world, epochs, world_size=world)[0]
                    row += f"{f'{(found - weights).abs().max():.0e} / {(told - losses).abs().max():.0e}':>20}"  # noqa: E501
                print(f"{setting.name + ', ' + name:44}{row}")


if __name__ == "__main__":
    main()
