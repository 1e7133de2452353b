"""The entry of ``python -m ddpkit.speechbrain``: runs a script as ``python`` would."""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path

from ddpkit.porting import environment

USAGE = """\
usage: python -m ddpkit.speechbrain train.py hparams.yaml [options of the recipe]
       python -m ddpkit.speechbrain train.py hparams.yaml --nproc=2
       torchrun --standalone --nproc_per_node=2 -m ddpkit.speechbrain train.py hparams.yaml
       eval "$(python -m ddpkit.speechbrain --environment)"; torchrun ... train.py hparams.yaml

Runs an untouched SpeechBrain recipe with its training core answered by ddpkit, and all else by SpeechBrain.
DDPKIT_SPEECHBRAIN=0 in the environment switches that off: the recipe then runs on SpeechBrain alone.
"""  # noqa: E501


def main(words: list[str]) -> int:
    """Run the command.

    Args:
        words: of the command line, after the module's name.

    Returns:
        The exit code: 2 where the script cannot be started. What the script itself ends with goes
        through.

    Ranks: local; on every rank under torchrun.
    """
    if words in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if words == ["--environment"]:
        sys.stdout.write(
            "".join(
                f"export {name}={shlex.quote(value)}\n" for name, value in environment().items()
            )
        )
        return 0
    if not words or not Path(words[0]).is_file():
        sys.stderr.write(
            f"{USAGE}python -m ddpkit.speechbrain: error: the script comes first, and it is not "
            "there\n"
        )
        return 2
    # Python put the working folder there, for this module
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(words[0]).resolve().parent)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
