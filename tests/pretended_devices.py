"""Devices that a test pretends to have."""

from __future__ import annotations

from ddpkit import base, device
from ddpkit.base import accelerators


def pretend_devices(monkeypatch, kind="cpu", **counts):
    """Have every part of ddpkit find so many devices of each kind, and prefer one kind."""
    for module in (accelerators, base, device):
        monkeypatch.setattr(module, "count_devices", lambda asked: counts.get(asked, 0))
        monkeypatch.setattr(module, "accelerator_kind", lambda: kind)
