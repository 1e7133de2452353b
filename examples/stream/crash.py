"""Train without interruption; train and be killed in the middle of an epoch; start again; compare.

    python crash.py              one process
    python crash.py --nproc 2    two

What else is given is handed on to train.py.
"""

import subprocess
import sys
from pathlib import Path

from ddpkit.checkpoints import safe_load


def train(folder, *words):
    command = [
        sys.executable,
        "train.py",
        "hparams.yaml",
        f"--output_folder={folder}",
        *words,
        *sys.argv[1:],
    ]
    print("python", *command[1:], flush=True)
    return subprocess.run(command, check=False).returncode


def newest(folder):
    return max(Path(folder, "save").glob("CKPT+*"))


def same(one, other):
    """Compare all tensors in two plain containers, bit by bit."""
    if hasattr(one, "items"):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one.equal(other) if hasattr(one, "equal") else one == other


def main():
    if train("results/whole"):
        sys.exit("The run that nobody kills has failed.")
    if not train("results/killed", "--kill_at_step=85"):
        sys.exit(
            "The run was to kill itself, and has not. Has it been here before? Remove results."
        )
    if train("results/killed"):
        sys.exit("The run that was started again has failed.")
    for name in ("net", "optimizer"):
        files = [newest(folder) / f"{name}.ckpt" for folder in ("results/whole", "results/killed")]
        if not same(*map(safe_load, files)):
            sys.exit(
                f"{name}: the run that was killed has ended otherwise: {files[0]} and {files[1]} "
                "differ."
            )
    print(
        "Killed and started again, it has ended with the same weights and optimizer state, to the "
        "last bit."
    )


if __name__ == "__main__":
    main()
