"""The same by hand in torch, as scripts on the web have it.

    python by_hand.py                                        one process
    torchrun --standalone --nproc_per_node=2 by_hand.py      two

Its weights are others, and not the same on one process and on two: see the README.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from spirals import network, spirals
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

EPOCHS = 10
LR = 0.01
MAX_GRAD_NORM = 5.0
BATCH_SIZE = 32
EVALUATION_BATCH_SIZE = 100
SEED = 1234
CHECKPOINT = Path("results/by_hand.pt")


def train(model, loader, optimizer):
    model.train()
    for points, arms in loader:
        loss = cross_entropy(model(points), arms)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()


@torch.no_grad()
def evaluate(net, loader):
    net.eval()
    sums = torch.zeros(3)
    for points, arms in loader:
        scores = net(points)
        right = (scores.argmax(1) == arms).sum()
        sums += torch.stack(
            [cross_entropy(scores, arms, reduction="sum"), right, torch.tensor(len(arms))]
        )
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    return loss / count, right / count


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(SEED)
    # torch's SyncBatchNorm runs on GPUs only: each process has statistics of its own
    net = network()
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    start = 1
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1

    train_set = spirals(1000, seed=1)
    valid_set = spirals(300, seed=2)
    # repeats samples to divide them evenly
    sampler = DistributedSampler(train_set, world_size, rank, seed=SEED)
    train_loader = DataLoader(train_set, BATCH_SIZE // world_size, sampler=sampler)
    valid_part = Subset(valid_set, range(rank, len(valid_set), world_size))
    valid_loader = DataLoader(valid_part, EVALUATION_BATCH_SIZE)
    for epoch in range(start, EPOCHS + 1):
        sampler.set_epoch(epoch)
        train(model, train_loader, optimizer)
        loss, accuracy = evaluate(net, valid_loader)
        if rank == 0:
            print(f"epoch: {epoch} - valid loss: {loss:.2e}, valid accuracy: {accuracy:.2e}")
            CHECKPOINT.parent.mkdir(exist_ok=True)
            new = CHECKPOINT.with_suffix(".new")
            torch.save(
                {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                new,
            )
            new.replace(CHECKPOINT)
    if dist.is_initialized():
        # if it outlives the group, torch may hang: the group's last thread and Python's wait for
        # each other
        del model
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
