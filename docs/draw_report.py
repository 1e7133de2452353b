"""Draw the picture of a report: `python docs/draw_report.py [PICTURE]`, with PYTHONPATH=. in a
checkout.

It is drawn by `python -m ddpkit report` from a run that was recorded: examples/digits on two
processes, killed after its seventh epoch and started again. The build of the pages draws it anew
for them; README shows docs/pictures.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ddpkit.cli import main as ddpkit_command

DOCS = Path(__file__).resolve().parent
RECORDED = DOCS / "recorded_runs" / "digits"
OF_README = DOCS / "pictures" / "report.png"


def draw(picture: Path) -> None:
    """Draw the recorded run.

    Args:
        picture: the file, a PNG.
    """
    picture.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        words = ["report", str(RECORDED), "-o", str(page), "--png", str(picture)]
        if ddpkit_command(words):
            raise SystemExit(f"python -m ddpkit {' '.join(words)} has failed.")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else OF_README)
