"""How long the main thread of this process was ready to run and had no core.

On a machine with more busy threads than cores each of them waits for its turn. A rank that is
slower for that alone is not at fault, and neither are its data or its model.
"""

from __future__ import annotations

import time
from pathlib import Path


class CoreWaits:
    """Reads what the kernel has counted of the main thread's waits for a core.

    Args:
        file: of the kernel: nanoseconds on a core, nanoseconds of waiting for one, and turns. It
            costs some ten microseconds to read.
    """

    def __init__(self, file: Path = Path("/proc/self/schedstat")) -> None:
        self._file = file
        self._waited = self._read()
        self._read_at = time.perf_counter()

    def share(self) -> float:
        """Return the share of the time since the last call, 0 to 1; 0 where the kernel does not
        tell.
        """
        before = self._waited
        began = self._read_at
        self._waited = self._read()
        self._read_at = time.perf_counter()
        passed = max(self._read_at - began, 1e-9)
        return min(max((self._waited - before) / passed, 0.0), 1.0)

    def _read(self) -> float:
        """Return the seconds since the process began."""
        try:
            words = self._file.read_text(encoding="ascii").split()
        except OSError:  # no Linux, or a kernel that does not count
            return 0.0
        return int(words[1]) / 1e9
