"""``python -m ddpkit report``: one page about a run, or about several against each other.

The page is a single file without scripts, fonts or pictures from elsewhere, so that it can be sent
and opened anywhere. The run may be going on: nothing is locked, and nothing is written into its
folder unless it is the current one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ddpkit.cli import command_parser, say

__all__ = ["run"]

PROGRAM = "python -m ddpkit report"

_DESCRIPTION = """\
Write one page about a run: curves, speed, memory, restarts and what they cost, checkpoints, settings, log. Of
several runs, the page draws the curves over each other and lists what differs. A RUN is the folder of
an experiment, such as results/1234, or its metrics.jsonl. It may be going on, or have crashed."""  # noqa: E501

_EPILOG = """\
examples:
  python -m ddpkit report results/1234
  python -m ddpkit report results/1234 results/1235 -o compared.html
  python -m ddpkit report results/1234 --png overview.png
"""


def run(words: Sequence[str]) -> int:
    """Write the page, and the picture if it is asked for.

    Args:
        words: what stands after ``report`` on the command line.

    Returns:
        The exit status: 0.

    Raises:
        ConfigError: a RUN is none, or a file cannot be written.
        MissingExtraError: jinja2 or matplotlib is not installed.
        SystemExit: after ``--help``, and with status 2 for wrong usage.

    Example:
        >>> import tempfile
        >>> run([tempfile.mkdtemp()])
        Traceback (most recent call last):
        ddpkit.errors.ConfigError: RUN='...' is no folder of a run: it has no metrics.jsonl ...
    """
    options = _parser().parse_args(words)
    from ddpkit.mirror import copied_down
    from ddpkit.see import find_runs, read_run, require_extra, write_page, write_picture

    require_extra()
    files = find_runs([str(copied_down(run)) for run in options.runs])
    _require_writable(options)
    runs = [read_run(file) for file in files]
    _write("--output", options.output, write_page(runs).encode())
    if options.png is not None:
        _write("--png", options.png, write_picture(runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(PROGRAM, _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="folder of an experiment, or metrics.jsonl",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("report.html"),
        help="the page (default: report.html in the current folder)",
    )
    parser.add_argument(
        "--png",
        metavar="FILE",
        type=Path,
        help="also draw an overview as a picture",
    )
    return parser


def _require_writable(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written before a long log is read."""
    from ddpkit.base import require_writable_file
    from ddpkit.errors import ConfigError

    for name, path, suffix in (("output", options.output, ".html"), ("png", options.png, ".png")):
        if path is None:
            continue
        what = f"--{name}={str(path)!r}"
        if path.suffix.lower() != suffix:  # it might be a log of a run
            raise ConfigError(f"{what}: the name of this file must end in {suffix}.")
        require_writable_file(what, path)


def _write(option: str, path: Path, content: bytes) -> None:
    from ddpkit.base import replacing, writing

    with writing(f"{option}={str(path)!r}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            unfinished.write_bytes(content)
    say(f"{path}: {len(content) / 1000:.0f} kB")
