"""What forked ranks write, shown by the process that has forked them.

A notebook shows what its own process hands to it. What a forked process writes to the kernel's
streams comes late, or never: when the cell is over, nobody waits for it. So the ranks write into
pipes, and all that was in these is shown before the cell ends. What C++ code writes, as NCCL does,
is shown too.
"""

from __future__ import annotations

import codecs
import os
import select
import sys
import time

_CHUNK = 1 << 16
_REST_SECONDS = 5.0  # for a process that writes on
_STREAMS = ("stdout", "stderr")


class RankOutput:
    """Two pipes, one for each of ``stdout`` and ``stderr``, that all ranks share.

    Example:
        >>> output = RankOutput()
        >>> _ = os.write(output.writing["stdout"], b"from a rank")
        >>> _ = output.show(0)
        from a rank
        >>> output.close()
    """

    def __init__(self) -> None:
        self.reading: dict[str, int] = {}
        self.writing: dict[str, int] = {}
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}
        for name in _STREAMS:
            self.reading[name], self.writing[name] = os.pipe()
            os.set_blocking(self.reading[name], False)
            # a letter may come in two pieces
            self._decoders[name] = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write_here(self) -> None:
        """Have this process, a rank, write into the pipes.

        State: the descriptors 1 and 2; ``sys.stdout`` and ``sys.stderr``.
        """
        for number, name in enumerate(_STREAMS, start=1):
            os.dup2(self.writing[name], number)
            # by line: ranks that write at the same time do not mix within one
            stream = open(  # noqa: SIM115 -- it is the stream of this process to its end
                number,
                "w",
                buffering=1,
                encoding="utf-8",
                errors="backslashreplace",
                closefd=False,
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        self.close()

    def show(self, seconds: float) -> bool:
        """Show what the ranks have written.

        Args:
            seconds: how long to wait for something.

        Returns:
            Whether there was something.
        """
        names = {descriptor: name for name, descriptor in self.reading.items()}
        ready, _, _ = select.select(list(names), [], [], seconds)
        for descriptor in ready:
            name = names[descriptor]
            stream = getattr(sys, name)
            stream.write(self._decoders[name].decode(os.read(descriptor, _CHUNK)))
            stream.flush()
        return bool(ready)

    def show_rest(self) -> None:
        """Show what is left in the pipes when the ranks have ended; a process that a rank has
        started may have them open still.
        """
        end = time.monotonic() + _REST_SECONDS
        while self.show(0) and time.monotonic() < end:
            pass

    def close(self) -> None:
        """Close the pipes in this process."""
        for descriptor in (*self.reading.values(), *self.writing.values()):
            os.close(descriptor)
