"""Figures in words."""

from __future__ import annotations

from ddpkit.step_times.phases import BACKWARD, DATA, EXCHANGE, FORWARD, MOVE, OPTIMIZER, OTHER

SIZES = ("bytes", "kB", "MB", "GB", "TB")
KILO = 1000.0
#: From here on digits behind the point tell nothing.
LONG_MILLISECONDS = 10.0
HIGH_RATE = 100.0

#: Each phase, after "late in".
PHASE_WORDS = {
    DATA: "waiting for its batches",
    MOVE: "what comes before the model is called",
    FORWARD: "the forward pass",
    BACKWARD: "the backward pass",
    EXCHANGE: "the exchange of gradients",
    OPTIMIZER: "the optimizer",
    OTHER: "what comes between the steps",
}


def duration(seconds: float) -> str:
    """Return a length of time in words.

    Example:
        >>> duration(0.2034), duration(2.5), duration(0.0042)
        ('203 ms', '2.50 s', '4.2 ms')
    """
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    milliseconds = seconds * 1e3
    digits = 0 if milliseconds >= LONG_MILLISECONDS else 1
    return f"{milliseconds:.{digits}f} ms"


def percent(share: float) -> str:
    """Return a share in words.

    Example:
        >>> percent(0.713)
        '71 %'
    """
    return f"{share:.0%}".replace("%", " %")


def size(amount: float) -> str:
    """Return a number of bytes in words.

    Example:
        >>> size(50.4e6), size(12)
        ('50.4 MB', '12 bytes')
    """
    step = 0
    while abs(amount) >= KILO and step < len(SIZES) - 1:
        amount /= KILO
        step += 1
    return f"{amount:.1f} {SIZES[step]}" if step else f"{amount:.0f} bytes"


def rate(per_second: float) -> str:
    """Return a number of things per second in words, to three digits.

    Example:
        >>> rate(1234.5), rate(0.034)
        ('1234', '0.034')
    """
    return f"{per_second:.0f}" if per_second >= HIGH_RATE else f"{per_second:.3g}"


def rank_words(rank: int, host: str | None) -> str:
    """Return a rank with its machine, to begin a sentence.

    Example:
        >>> rank_words(1, "node7"), rank_words(0, None)
        ('Rank 1 (node7)', 'Rank 0')
    """
    return f"Rank {rank} ({host})" if host else f"Rank {rank}"
