"""The training by hand in torch: `torchrun --standalone --nproc_per_node=2 by_hand.py`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from task import network, spirals
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

PATIENCE = 3


def main():
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train_set, valid_set = spirals(1000, seed=1), spirals(300, seed=2)
    sampler = DistributedSampler(train_set, seed=1)
    train_loader = DataLoader(train_set, batch_size=32 // processes, sampler=sampler)
    mine = torch.utils.data.Subset(valid_set, range(rank, len(valid_set), processes))
    first, best, waited = 1, float("inf"), 0
    if Path("results.pt").exists():
        saved = torch.load("results.pt")
        net.module.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        first, best, waited = saved["next"], saved["best"], saved["waited"]
    for epoch in range(first, 6):
        net.train()
        sampler.set_epoch(epoch)
        for points, arms in train_loader:
            optimizer.zero_grad()
            cross_entropy(net(points), arms).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()

        net.eval()
        sums = torch.zeros(3)
        with torch.no_grad():
            for points, arms in DataLoader(mine, batch_size=100):
                scores = net.module(points)
                sums[0] += cross_entropy(scores, arms, reduction="sum")
                sums[1] += (scores.argmax(1) == arms).sum()
                sums[2] += len(arms)
        dist.all_reduce(sums)
        loss, accuracy = (sums[:2] / sums[2]).tolist()
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}")
            saved = {"net": net.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**saved, "next": epoch + 1, "best": best, "waited": waited}, "results.pt")
        if waited == PATIENCE:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
