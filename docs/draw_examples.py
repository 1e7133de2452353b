"""Draw the learning curve of every example: `python docs/draw_examples.py [NAME...]`, with
PYTHONPATH=. in a checkout.

Each is trained on one process in a folder of its own; what it has logged for each epoch becomes
docs/examples/NAME.svg.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 480
HEIGHT = 240
LEFT = 52
RIGHT = 12
TOP = 30
BOTTOM = 34
# What is drawn of each example: (key, of train or valid, words, colour).
BLUE = "#2563eb"
ORANGE = "#d97706"
LOSSES = [("train", "loss", "train loss", BLUE), ("valid", "loss", "valid loss", ORANGE)]
CURVES = {
    "digits": LOSSES,
    "language_model": [
        ("train", "bits", "train", BLUE),
        ("valid", "bits", ("valid (bits per character)"), ORANGE),
    ],
    "gan": [
        ("train", "generator", "generator loss", BLUE),
        ("valid", "distance", ("distance to a centre"), ORANGE),
    ],
    "tagging": LOSSES,
    "stream": LOSSES,
    "fine_tuning": LOSSES,
    "own_loop": LOSSES,
    "speech": LOSSES,
    "tabular": LOSSES,
    "transformer": LOSSES,
}
WORDS = {"tagging": ["--grad_accumulation_factor=2"]}


def epochs_of(name: str) -> list[dict[str, dict[str, float]]]:
    """Train an example and return what it has logged for each epoch."""
    with tempfile.TemporaryDirectory() as folder:
        place = shutil.copytree(
            ROOT / "examples" / name,
            Path(folder, name),
            ignore=shutil.ignore_patterns("results"),
        )
        words = ["train.py", "hparams.yaml", "--output_folder=run", *WORDS.get(name, [])]
        subprocess.run([sys.executable, *words], cwd=place, check=True, capture_output=True)
        lines = (place / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        event for event in map(json.loads, lines) if event["event"] == "stats" and "valid" in event
    ]


def drawing(
    epochs: list[dict[str, dict[str, float]]],
    curves: list[tuple[str, str, str, str]],
) -> str:
    """Return the curves as SVG: epochs to the right, values from 0 upwards."""
    values = [[epoch[part][key] for epoch in epochs] for part, key, _, _ in curves]
    highest = max(map(max, values))
    wide = WIDTH - LEFT - RIGHT
    high = HEIGHT - TOP - BOTTOM

    def place(number: int, value: float) -> str:
        return f"{LEFT + wide * number / max(len(epochs) - 1, 1):.1f},{TOP + high * (1 - value / highest):.1f}"  # noqa: E501

    box = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [f'<svg {box} font-family="sans-serif" font-size="12">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>')
    for share in (0, 0.5, 1):
        y = TOP + high * (1 - share)
        parts.append(f'<path d="M{LEFT} {y:.1f}h{wide}" stroke="#d4d4d4"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" '
            f'fill="#444">{highest * share:.2f}</text>'
        )
    for number in sorted({0, len(epochs) // 2, len(epochs) - 1}):
        x = place(number, 0).split(",")[0]
        parts.append(
            f'<text x="{x}" y="{HEIGHT - 16}" text-anchor="middle" fill="#444">{number + 1}</text>'
        )
    parts.append(
        f'<text x="{LEFT + wide / 2:.0f}" y="{HEIGHT - 2}" text-anchor="middle" '
        'fill="#444">epoch</text>'
    )
    for number, (one, (_, _, words, colour)) in enumerate(zip(values, curves, strict=True)):
        points = " ".join(place(at, value) for at, value in enumerate(one))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(
            f'<text x="{LEFT + number * wide / 2:.0f}" y="18" fill="{colour}">{words}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Draw the examples that are named on the command line, or all."""
    (ROOT / "docs" / "examples").mkdir(exist_ok=True)
    for name in sys.argv[1:] or CURVES:
        (ROOT / "docs" / "examples" / f"{name}.svg").write_text(
            drawing(epochs_of(name), CURVES[name]),
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
