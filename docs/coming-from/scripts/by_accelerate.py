"""The training with Accelerate: `accelerate launch --num_processes 2 by_accelerate.py`."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from task import network, spirals
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

PATIENCE = 3


def main():
    set_seed(1)
    accelerator = Accelerator()
    batch_size = 32 // accelerator.num_processes
    net = network()
    net, optimizer, train_loader, valid_loader = accelerator.prepare(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.01),
        DataLoader(spirals(1000, seed=1), batch_size=batch_size, shuffle=True),
        DataLoader(spirals(300, seed=2), batch_size=100),
    )
    best, waited = float("inf"), 0
    for epoch in range(1, 6):
        net.train()
        for points, arms in train_loader:
            loss = cross_entropy(net(points), arms)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        net.eval()
        losses, right = [], []
        for points, arms in valid_loader:
            with torch.no_grad():
                scores = net(points)
            each = cross_entropy(scores, arms, reduction="none")
            losses.append(accelerator.gather_for_metrics(each))
            right.append(accelerator.gather_for_metrics(scores.argmax(1) == arms))
        loss = torch.cat(losses).mean().item()
        accuracy = torch.cat(right).float().mean().item()
        accelerator.print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}")
        accelerator.save_state("results")
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        if waited == PATIENCE:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
