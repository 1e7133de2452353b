"""What is known of GPUs: by NVIDIA's driver, by torch, and by the variables that hide them."""

from __future__ import annotations
