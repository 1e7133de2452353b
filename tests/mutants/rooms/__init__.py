"""The faults, a module for each part of the package."""

from __future__ import annotations

import importlib
import pkgutil

from tests.mutants.fault import Fault


def all_faults() -> list[Fault]:
    """Return the faults of all modules here, in the order of their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    return [fault for module in modules for fault in module.FAULTS]
