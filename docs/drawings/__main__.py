"""``python -m drawings FOLDER``: draw all pictures."""

from __future__ import annotations

import sys
from pathlib import Path

from drawings import draw_all

draw_all(Path(sys.argv[1]))
