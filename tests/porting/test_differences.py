"""What behaves differently in a recipe: told where it is, and nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ddpkit.porting import DIFFERENCES
from ddpkit.porting.differences import difference, python_differences, yaml_differences

ROOT = Path(__file__).resolve().parents[2]


def kinds(notes):
    names = {difference(kind, [1]).text: kind for kind in DIFFERENCES}
    return {names[note.text]: note.lines for note in notes}


def in_brain(*lines):
    return "class A(sb.Brain):\n" + "".join(f"    {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (in_brain("def fit_batch(self, batch):", "    pass"), {"fit_batch": (2,)}),
        ("class A:\n    def fit_batch(self, batch): ...\n", {"fit_batch": (2,)}),
        ("class Model:\n    def forward(self, x): ...\n    def _save(self): ...\n", {}),
        (in_brain("def f(self): self.backward(loss); self.optimizers_step()"), {}),
        (
            in_brain("def f(self):", "    loss.backward()", "    x()", "    (a + b).backward()"),
            {"backward": (3, 5)},
        ),
        (in_brain("def f(self): self.optimizer.step()"), {"own step": (2,)}),
        (in_brain("def f(self): self.scaler.step(self.optimizer_g)"), {"own step": (2,)}),
        (in_brain("def f(self): self.scheduler.step()"), {}),
        (in_brain("def f(self): return loss / self.grad_accumulation_factor"), {"factor": (2,)}),
        (in_brain("def f(self): loss /= self.hparams.grad_accumulation_factor"), {"factor": (2,)}),
        (
            in_brain("def f(self): return self.step % self.grad_accumulation_factor == 0"),
            {"window": (2,)},
        ),
        (in_brain("def f(self): print(self.grad_accumulation_factor)"), {}),
        (in_brain("def _train_loader_specifics(self, data, kwargs): ..."), {"not called": (2,)}),
        (in_brain("def make_dataloader(self, data, stage): ..."), {"make_dataloader": (2,)}),
        (
            in_brain(
                "def compute_objectives(self, p, b, s):",
                "    return self.hparams.seq_cost(p, b.y, length=lens)",
            ),
            {"masked mean": (3,)},
        ),
        (
            in_brain(
                "def compute_objectives(self, p, b, s):",
                "    return sb.nnet.losses.nll_loss(p, b.y, b.y_lens)",
            ),
            {"masked mean": (3,)},
        ),
        (
            in_brain(
                "def compute_objectives(self, p, b, s):",
                "    return nll_loss(p, b.y, length=lens), lens.sum()",
            ),
            {},
        ),
        (
            in_brain(
                "def compute_objectives(self, p, b, s): return self.hparams.ctc_cost(p, y, "
                "wav_lens, y_lens)"
            ),
            {},
        ),
        (
            in_brain(
                "def compute_objectives(self, p, b, s): return self.wer_metric.append(p, "
                "target_len=y_lens)"
            ),
            {},
        ),
        (in_brain("def compute_objectives(self, p, b, s): return mse_loss(p, b[1])"), {}),
        ("s = sb.dataio.sampler.DistributedSamplerWrapper(inner)", {"divided sampler": (1,)}),
        ("from x import Pretrainer\np = Pretrainer(collect_in='save')", {"pretrainer": (2,)}),
    ],
)
def test_what_a_script_shows(text, found):
    assert kinds(python_differences(ast.parse(text))) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("dataloader_opts:\n  batch_size: 2", {"in order": (1,)}),
        ("x: 1\ntrain_dataloader_opts: {batch_size: 2, shuffle: True}", {}),
        ("loader: {batch_size: 2, sampler: !ref <x>}", {}),
        ("sorting: random\ndataloader_opts: {batch_size: 2}", {}),
        ("valid_dataloader_opts: {batch_size: 2}", {}),
        ("dataloader_opts: !ref <others>", {}),
        ("dataloader_opts: {num_workers: 2}", {}),
        ("grad_accumulation_factor: 4", {"accumulation": (1,)}),
        ("grad_accumulation_factor: 1", {}),
        (
            "p: !new:speechbrain.utils.parameter_transfer.Pretrainer {paths: {a: /b}}",
            {"pretrainer": (1,)},
        ),
        ("? [a, b]\n: max_grad_norm\nopts: {? [a] : 1}", {}),
        ("x: !apply:torch.manual_seed [1]", {"seed": (1,)}),
        ("x: !apply:torch.manual_seed [1]\ny: !apply:ddpkit.seed_everything [1]", {}),
        ("- 1", {}),
        ("", {}),
    ],
)
def test_what_a_yaml_file_shows(text, found):
    assert kinds(yaml_differences(text)) == found


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_a_link_leads_to_a_heading(kind):
    page, _, heading = difference(kind, [1]).link.partition("#")
    text = (ROOT / page).read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in re.findall("(?m)^#+ .*", text)
    }
    assert not heading or heading in headings
