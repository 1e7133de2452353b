"""Pictures that explain: SVG, drawn at each build of the pages from what the code says.

`python -m drawings FOLDER` in docs, with PYTHONPATH=.. in a checkout, draws them without a build.
"""

from __future__ import annotations

from pathlib import Path

from drawings import (
    accumulation_window,
    order_of_calls,
    resume_in_an_epoch,
    samples_of_processes,
    split_of_a_step,
)

ALL = {
    "accumulation_window": accumulation_window.draw,
    "order_of_calls": order_of_calls.draw,
    "resume_in_an_epoch": resume_in_an_epoch.draw,
    "samples_of_processes": samples_of_processes.draw,
    "split_of_a_step": split_of_a_step.draw,
}


def draw_all(folder: Path) -> None:
    """Write every picture into a folder, as NAME.svg; one that is the same stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in ALL.items():
        path = folder / f"{name}.svg"
        text = draw()
        # a newer file would have its pages built again
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
