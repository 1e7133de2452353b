"""What behaves differently in a recipe: told where it is, and nowhere else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from ddpkit.porting import DIFFERENCES
from ddpkit.porting.differences import Loaders, difference, python_differences, read_loaders, yaml_differences

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
        (in_brain("def fit_batch(self, batch): return loss.detach().cpu()"), {"fit_batch": (2,), "host read": (2,)}),
        (in_brain("def evaluate_batch(self, batch, stage): return loss.detach().cpu()"), {}),
        (in_brain("def f(self): self.backward(loss); self.optimizers_step()"), {}),
        (in_brain("def f(self):", "    loss.backward()", "    x()", "    (a + b).backward()"), {"backward": (3, 5)}),
        (in_brain("def f(self): self.optimizer.step()"), {"own step": (2,)}),
        (in_brain("def f(self): self.scaler.step(self.optimizer_g)"), {"own step": (2,)}),
        (in_brain("def f(self): self.scheduler.step()"), {}),
        (in_brain("def f(self): return loss / self.grad_accumulation_factor"), {"factor": (2,)}),
        (in_brain("def f(self): loss /= self.hparams.grad_accumulation_factor"), {"factor": (2,)}),
        (in_brain("def f(self): return self.step % self.grad_accumulation_factor == 0"), {"window": (2,)}),
        (in_brain("def f(self): print(self.grad_accumulation_factor)"), {}),
        (in_brain("max_grad_norm = 1.0", "weight = 2.0"), {"class option": (2,)}),
        (in_brain("def __init__(self): self.max_grad_norm = 1.0"), {}),
        (in_brain("def _train_loader_specifics(self, data, kwargs): ..."), {"not called": (2,)}),
        (in_brain("def _save(self, path): ...", "def _recover(self, path): ..."), {"own saving": (2, 3)}),
        (in_brain("def make_dataloader(self, data, stage): ..."), {"make_dataloader": (2,)}),
        (
            in_brain("def compute_objectives(self, p, b, s):", "    return self.hparams.seq_cost(p, b.y, length=lens)"),
            {"masked mean": (3,)},
        ),
        (
            in_brain("def compute_objectives(self, p, b, s):", "    return sb.nnet.losses.nll_loss(p, b.y, b.y_lens)"),
            {"masked mean": (3,)},
        ),
        (
            in_brain("def compute_objectives(self, p, b, s):", "    return nll_loss(p, b.y, length=lens), lens.sum()"),
            {},
        ),
        (in_brain("def compute_objectives(self, p, b, s): return self.hparams.ctc_cost(p, y, wav_lens, y_lens)"), {}),
        (in_brain("def compute_objectives(self, p, b, s): return self.wer_metric.append(p, target_len=y_lens)"), {}),
        (in_brain("def compute_objectives(self, p, b, s): return mse_loss(p, b[1])"), {}),
        ("s = sb.dataio.sampler.DistributedSamplerWrapper(inner)", {"divided sampler": (1,)}),
        ("s = SaveableGenerator()", {"generator": (1,)}),
        ("from x import Pretrainer\np = Pretrainer(paths={'a': '/a'})", {"pretrainer": (2,)}),
        ("from x import Pretrainer\np = Pretrainer(collect_in='save')", {}),  # it stays SpeechBrain's
        ("train_loader = DataLoader(data)\nvalid_loader = DataLoader(data)", {"divided loader": (1,)}),
        ("if if_main_process():\n    self.checkpointer.save_and_keep_only(meta={})", {"saved by main": (1,)}),
        ("if sb.utils.distributed.if_main_process():\n    if x:\n        c.save_checkpoint()", {"saved by main": (1,)}),
        ("if if_main_process():\n    print(1)\nelse:\n    c.save_checkpoint()", {}),
        ("c.save_checkpoint()", {}),
    ],
)
def test_what_a_script_shows(text, found):
    assert kinds(python_differences(ast.parse(text))) == found


MODULES = """\
encoder: !new:torch.nn.Linear [2, 2]
features: !new:speechbrain.lobes.features.Fbank
modules:
    enc: !ref <encoder>
    features: !ref <features>
    made: !new:torch.nn.Linear [2, 2]
"""


@pytest.mark.parametrize(
    ("called", "found"),
    [
        ("self.hparams.encoder(x)", {"past DDP": (1,)}),
        ("self.modules.encoder(self.hparams.features(x))", {}),
        ("self.hparams.encoder.weight", {}),
        ("self.hparams.made(x)", {}),
    ],
)
def test_a_module_that_is_called_past_ddp_is_told_where_it_is_made(called, found):
    said = read_loaders(ast.parse(f"class A(sb.Brain):\n    def compute_forward(self, x, stage): return {called}"))
    assert kinds(yaml_differences(MODULES, said)) == found


def loaders(text):
    found = read_loaders(ast.parse(text))
    return found.keys, found.lines, found.is_ordered


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("b.fit(hparams['epoch_counter'], d, train_loader_kwargs=hparams['opts'])", ({"opts"}, [], False)),
        ("b.fit(e, d, train_loader_kwargs=self.hparams.opts)", ({"opts"}, [], False)),
        ("k = hparams['opts']\nb.fit(e, d, train_loader_kwargs=k)", ({"opts"}, [], False)),
        ("b.fit(e, d, train_loader_kwargs={'batch_size': 2})", (set(), [1], False)),
        ("b.fit(b.hparams.epoch_counter, d)", (set(), [1], False)),
        ("model.fit(x, y)", (set(), [], False)),
        ("b.fit(e, d, train_loader_kwargs={'shuffle': False})", (set(), [1], True)),
        ("b.fit(e, d, train_loader_kwargs=dict(sampler=s))", (set(), [1], True)),
        ("hparams['opts']['shuffle'] = False\nb.fit(e, d, train_loader_kwargs=hparams['opts'])", ({"opts"}, [], True)),
        ("l = make_dataloader(d)\nb.fit(hparams.epoch_counter, l)", (set(), [2], True)),
    ],
)
def test_what_a_script_says_of_its_loader(text, found):
    assert loaders(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("opts:\n  batch_size: 2", {"in order": (1,)}),
        ("x: 1\nopts: {batch_size: 2, shuffle: True}", {}),
        ("opts: {batch_size: 2, batch_sampler: !ref <x>}", {}),
        ("sorting: random\nopts: {batch_size: 2}", {}),
        ("valid_opts: {batch_size: 2}", {}),
        ("opts: !ref <others>", {}),
        ("grad_accumulation_factor: 4", {"accumulation": (1,)}),
        ("grad_accumulation_factor: 1", {}),
        ("max_grad_norm: 0.0", {"clipping": (1,)}),
        ("max_grad_norm: -1", {"clipping": (1,)}),
        ("max_grad_norm: 0.5", {}),
        ("jit_module_keys: [a]", {"jit": (1,)}),
        ("jit: False", {}),
        ("p: !new:speechbrain.utils.parameter_transfer.Pretrainer {paths: {a: /b}}", {"pretrainer": (1,)}),
        ("p: !new:speechbrain.utils.parameter_transfer.Pretrainer {paths: {a: b/c/d}}", {}),
        ("? [a, b]\n: max_grad_norm\nopts: {? [a] : 1}", {"in order": (3,)}),
        ("s: !new:speechbrain.utils.repro.SaveableGenerator\n  a: 1", {"generator": (1,)}),
        ("x: !apply:torch.manual_seed [1]", {"seed": (1,)}),
        ("x: !apply:torch.manual_seed [1]\ny: !apply:ddpkit.seed_everything [1]", {}),
        ("- 1", {}),
        ("", {}),
    ],
)
def test_what_a_yaml_file_shows(text, found):
    assert kinds(yaml_differences(text, Loaders({"opts"}))) == found


def test_a_script_that_says_the_order_speaks_for_its_yaml_files():
    assert yaml_differences("opts: {batch_size: 2}", Loaders({"opts"}, is_ordered=True)) == []


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_a_link_leads_to_a_heading(kind):
    page, _, heading = difference(kind, [1]).link.partition("#")
    text = (ROOT / page).read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in re.findall("(?m)^#+ .*", text)
    }
    assert not heading or heading in headings
