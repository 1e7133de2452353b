"""Tensors of all kinds travel from rank 0 in few messages, and arrive as they were."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import distributed as dist, nn

from ddpkit.strategies import sending


def tensors_of(rank):
    """Return tensors of many shapes, dtypes and orders in memory, other ones on each rank."""
    start = 100 * rank
    whole = torch.arange(start, start + 24)
    return [
        torch.tensor(rank == 0),
        whole.to(torch.int8),
        whole.double().reshape(2, 3, 4).transpose(0, 2),
        torch.full((), float(start)),
        torch.empty(0, 3),
        torch.complex(whole.float(), whole.float())[::2].conj(),  # the signs are not in memory
        torch.complex(whole.float(), whole.float())[:1].conj().imag,
        nn.Parameter(whole.bfloat16().reshape(4, 6).t()),
        whole.float().reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    ]


def sent(message_bytes):
    """Send them, and return what has come and in how many messages."""
    tensors = tensors_of(dist.get_rank())
    strides = [tensor.stride() for tensor in tensors]
    with (
        mock.patch.object(sending, "MESSAGE_BYTES", message_bytes),
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as messages,
    ):
        sending.send_from_main(iter(tensors))
    assert strides == [tensor.stride() for tensor in tensors]
    # resolved, as the way back from a rank forgets signs
    return [tensor.resolve_conj().resolve_neg() for tensor in tensors], messages.call_count


@pytest.mark.costly
def test_tensors_of_all_kinds_travel_in_few_messages(ranks):
    wanted = tensors_of(0)
    for size, count in ((1 << 20, 1), (200, 3)):
        for found, messages in ranks.run(sent, size, world_size=2):
            assert messages == count
            for value, expected in zip(found, wanted, strict=True):
                assert value.dtype == expected.dtype
                assert torch.equal(value, expected)
