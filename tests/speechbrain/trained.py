"""What a recipe has logged and saved, to be compared with another run of it."""

from __future__ import annotations

import re

import pytest
import torch

NUMBER = r"-?\d+\.\d+(?:e[+-]\d+)?"
LOSS = rf"\bloss: ({NUMBER})"
ROUNDING = {"rel": 2e-5, "abs": 1e-7}


class Trained:
    """The log and the newest weights of a run; of the words of the log, those that match
    ``different`` are left out.
    """

    def __init__(self, folder, different=None):
        self.log = (folder / "train_log.txt").read_text()
        text = re.sub(different, "", self.log) if different else self.log
        self.words = re.sub(NUMBER, "#", text)
        self.numbers = [float(one) for one in re.findall(NUMBER, text)]
        self.losses = [float(one) for one in re.findall(LOSS, text)]
        newest = max((folder / "save").glob("CKPT*"), key=_time)
        self.weights = {}
        for path in sorted(newest.glob("*.ckpt")):
            if path.stem in {"model", "encoder", "classifier", "generator", "critic"}:
                state = torch.load(path, weights_only=True)
                self.weights |= {
                    f"{path.stem}.{name}": value.double() for name, value in state.items()
                }

    def assert_same(self, other, numbers=ROUNDING):
        assert self.words == other.words
        assert self.numbers == pytest.approx(other.numbers, **numbers), f"{self.log}\n{other.log}"
        assert self.weights.keys() == other.weights.keys() != set()
        for name, value in self.weights.items():
            torch.testing.assert_close(
                value,
                other.weights[name],
                rtol=1e-4,
                atol=1e-6,
                msg=f"{name}: {value}",
            )

    def distance(self, other):
        """The greatest difference of two losses that are logged.

        Error rates and F are left out: they are counts of decisions, which a small difference of
        the weights can turn over, each by a whole item (of 17 phones: by 5.9 percent).
        ``assert_same`` compares them.
        """
        assert self.words == other.words
        return max(abs(one - two) for one, two in zip(self.losses, other.losses, strict=True))


def _time(checkpoint):
    """When it was saved: several of one second have names in any order."""
    return float(re.search(r"unixtime\W+([\d.]+)", (checkpoint / "CKPT.yaml").read_text())[1])
