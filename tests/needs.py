"""What an older torch lacks: tests of it are skipped there, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule


def needs_torch(version: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test with an older torch.

    Args:
        version: the oldest with which the test is known to pass.
        reason: what the older ones lack.
    """
    older = torch.__version__ < version
    return pytest.mark.skipif(older, reason=f"torch {torch.__version__}: {reason}")


# FSDP2 of torch 2.8 has none, and the library refuses virtual ranks under it by name.
needs_own_reduce_scatter = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"),
    reason=f"torch {torch.__version__}: FSDP2 takes no reduce-scatter of one's own",
)
