"""The checks in the order in which they run and are shown, within one verdict."""

from __future__ import annotations

from ddpkit.see.doctor.check import EACH_RANK, Check
from ddpkit.see.doctor.checks import open_files

CHECKS: tuple[Check, ...] = (Check("open files", open_files.look, EACH_RANK),)
