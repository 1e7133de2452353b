"""A small real recipe that tells where it is: ``python recipe.py hparams.yaml``, under any
launcher.

Each training step of each rank becomes a line of ``steps.jsonl`` in the output folder, and the end
of each rank a file ``end.RANK.json``. A file ``wait`` in that folder, with the number of a step in
it, holds the ranks after that step, so that a test can act while they are all there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from hyperpyyaml import load_hyperpyyaml
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import ddpkit
from ddpkit.distributed import get_rank, get_world_size

SCRIPT = Path(__file__)
HPARAMS = SCRIPT.with_name("hparams.yaml")
SAMPLES = 240
MAIN_STEP = 2
FAILS_AT = 13


@dataclass(frozen=True)
class Step:
    """One line of ``steps.jsonl``: a step of the optimizer, as one rank saw it."""

    rank: int
    world_size: int
    step: int
    epoch: int
    host: str
    pid: int
    time: float
    restart: int  # how often Slurm, or torchrun, has started the run again
    weights: str  # a digest: equal where the weights are
    samples: list[int]  # that this rank had in the step

    def key(self) -> tuple[int, str]:
        return self.step, self.weights


def read_steps(folder: Path) -> list[Step]:
    """Return the lines that were written so far; a line that a dying process has cut off is not
    one.
    """
    path = folder / "steps.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Step(**json.loads(line)) for line in lines if line.endswith("}")]


def read_ends(folder: Path) -> list[dict]:
    """Return what the ranks that came to the end wrote, by rank."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("end.*.json"))]


def _append(path: Path, line: str) -> None:
    """Add one line in one write: several processes write to this file."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


def _gate(folder: Path) -> float:
    """Return the step after which the ranks have to wait."""
    try:
        return int((folder / "wait").read_text())
    except FileNotFoundError:
        return math.inf


def _work_alone(folder: Path, seconds: float) -> None:
    (folder / "main_works").touch()
    time.sleep(seconds)


class Line(ddpkit.Brain):
    """Fits a line, slowly."""

    def compute_forward(self, batch, stage):
        return self.modules.net(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return F.mse_loss(predictions, batch[1])

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if not should_step:
            return
        folder = Path(self.hparams.output_folder)
        time.sleep(self.hparams.step_seconds)
        step = Step(
            rank=get_rank() or 0,
            world_size=get_world_size(),
            step=self.optimizer_step,
            epoch=self.hparams.epoch_counter.current,
            host=socket.gethostname(),
            pid=os.getpid(),
            time=time.time(),
            restart=int(
                os.environ.get("SLURM_RESTART_COUNT")
                or os.environ.get("TORCHELASTIC_RESTART_COUNT")
                or 0
            ),
            weights=digest(self.raw_modules),
            samples=((batch[0].flatten() + 1) / 2 * (SAMPLES - 1)).round().int().tolist(),
        )
        _append(folder / "steps.jsonl", json.dumps(asdict(step)))
        while step.step >= _gate(folder):
            time.sleep(0.02)
        if self.hparams.fails_on == (get_rank() or 0) and step.step == FAILS_AT:
            (folder / "failed").write_text(str(time.time()))
            raise ValueError("so it was asked for")
        if self.hparams.main_seconds and step.step == MAIN_STEP:
            ddpkit.run_on_main(_work_alone, args=[folder, self.hparams.main_seconds])

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage is ddpkit.Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])


def digest(module: torch.nn.Module) -> str:
    """Return a text that is equal for equal weights."""
    text = hashlib.sha256()
    for tensor in module.state_dict().values():
        text.update(tensor.numpy().tobytes())
    return text.hexdigest()[:16]


def main() -> None:
    file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = load_hyperpyyaml(Path(file).open(encoding="utf-8"), overrides)  # noqa: SIM115 -- it ends soon
    ddpkit.create_experiment_directory(hparams["output_folder"], file, overrides)
    inputs = torch.linspace(-1, 1, SAMPLES).unsqueeze(1)
    data = TensorDataset(inputs, 3 * inputs + 1)
    brain = Line(
        hparams["modules"],
        hparams["opt_class"],
        hparams,
        run_opts,
        hparams["checkpointer"],
    )
    brain.fit(hparams["epoch_counter"], data, data, train_loader_kwargs={"shuffle": True})
    end = {
        "rank": get_rank() or 0,
        "world_size": get_world_size(),
        "step": brain.optimizer_step,
        "host": socket.gethostname(),
        "weights": digest(brain.raw_modules),
    }
    Path(hparams["output_folder"], f"end.{end['rank']}.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main()
