"""Draw the plot of `scale`: `python docs/draw_scale.py PICTURE`, with PYTHONPATH=. in a checkout.

It is drawn by `python -m ddpkit scale --join` from results that were recorded: examples/transformer
on one process and on two, on a machine of two cores. The build of the pages draws it anew for them.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from ddpkit.cli import main as ddpkit_command

RECORDED = Path(__file__).resolve().parent / "recorded_runs" / "scale.json"


def draw(picture: Path) -> str:
    """Draw the recorded results.

    Args:
        picture: the file; its suffix says the format.

    Returns:
        what the command says about them.
    """
    words = ["scale", "--join", str(RECORDED), "--plot", str(picture)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        failed = ddpkit_command(words)
    if failed:
        raise SystemExit(f"python -m ddpkit {' '.join(words)} has failed.")
    return said.getvalue()


if __name__ == "__main__":
    sys.stdout.write(draw(Path(sys.argv[1])))
