"""A small transformer that reads from left to right."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Looks at all symbols so far, then works on each place by itself. The unit that repeats, and
    that fsdp shards.
    """

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.looked_up = nn.Linear(width, 3 * width, bias=False)
        self.joined = nn.Linear(width, width)
        self.inner = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, states):
        batch, length, width = states.shape
        parts = self.looked_up(self.norm(states)).view(
            batch,
            length,
            3,
            self.heads,
            width // self.heads,
        )
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        states = states + self.joined(seen.transpose(1, 2).reshape(states.shape))
        return states + self.inner(states)


class Transformer(nn.Module):
    """Symbols of shape (batch, length) in, scores of shape (batch, length, symbols) out."""

    def __init__(self, symbols, length, width, depth, heads):
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, symbols))

    def forward(self, read):
        places = torch.arange(read.shape[1], device=read.device)
        return self.scores(self.blocks(self.symbols(read) + self.places(places)))
