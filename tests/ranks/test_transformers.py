"""A model of the real transformers, with tokenized batches, on real ranks: a token loss as one
process has it.
"""

from __future__ import annotations

import pytest
import torch

from ddpkit.brain import Brain
from ddpkit.checkpoints import Checkpointer
from ddpkit.epoch_loop import EpochCounter
from ddpkit.types import Stage
from tests.ecosystem import OFFLINE, QUIET, Killed, needs
from tests.rank_pool import RankPool

pytestmark = needs("transformers", "tokenizers")
LINES = [
    "the cat sat",
    "a dog ran over the hill",
    "the hill sat",
    "cat",
    "a dog sat on the cat and ran",
    "over",
    "ran the dog",
    "a cat on the hill over the dog",
    "sat",
]


@pytest.fixture(scope="module")
def own_ranks():
    """Ranks that end with this module, and with them what it has imported."""
    with RankPool(timeout=300) as pool:
        yield pool


def collating():
    """Return what makes a BatchEncoding with labels of lines, and the number of words that it
    knows.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.train_from_iterator(LINES, trainers.WordLevelTrainer(special_tokens=["[UNK]", "[PAD]"]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="[UNK]",
        pad_token="[PAD]",
    )

    def collate(lines):
        batch = tokenizer(lines, padding=True, return_tensors="pt")
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch

    return collate, len(tokenizer)


class LanguageModel(Brain):
    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch

    def compute_forward(self, batch, stage):
        assert type(batch).__name__ == "BatchEncoding"
        if stage is Stage.TRAIN and (self.epoch, self.step) == self.dies_at:
            raise Killed
        batch.to(self.device)
        if self.kind == "mean":
            return self.modules.model(**batch)
        return self.modules.model(**batch, num_items_in_batch=1)  # divide by one: the sum

    def compute_objectives(self, outputs, batch, stage):
        if self.kind == "mean":
            return outputs.loss
        # each token is predicted but the first
        return outputs.loss, (batch["labels"][:, 1:] != -100).sum()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.losses.append((stage.name, epoch, stage_loss))
        if stage is Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss})


def fine_tune(folder, dies_at, kind):
    """Train a tiny GPT-2, whose input and output embeddings are one tensor."""
    from transformers import GPT2Config, GPT2LMHeadModel

    collate, vocabulary = collating()
    torch.manual_seed(3)
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    no_noise = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **sizes, **no_noise)).double()
    counter = EpochCounter(2)
    checkpointer = Checkpointer(folder, {"model": model, "counter": counter})
    adam = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    options = {**QUIET, "ckpt_interval_steps": 1, "global_batch_size": 4}
    brain = LanguageModel({"model": model}, adam, None, options, checkpointer)
    brain.kind = kind
    brain.dies_at = dies_at
    brain.losses = []
    kwargs = {"collate_fn": collate}
    try:
        brain.fit(
            counter,
            LINES,
            LINES[:5],
            train_loader_kwargs={**kwargs, "shuffle": True},
            valid_loader_kwargs={**kwargs, "batch_size": 2},
        )
    except Killed:
        return None
    return {
        name: value.clone() for name, value in brain.raw_modules.state_dict().items()
    }, brain.losses


def run_through_and_killed(ranks, folder, world, kind):
    given = {"world_size": world, "env": OFFLINE}
    through = ranks.run(fine_tune, str(folder / "through"), None, kind, **given)
    assert ranks.run(fine_tune, str(folder / "killed"), (2, 2), kind, **given) == [None] * world
    for found, expected in zip(
        ranks.run(fine_tune, str(folder / "killed"), None, kind, **given),
        through,
        strict=True,
    ):
        assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())
        assert found[1] == expected[1][-len(found[1]) :]
    return through[0]


def test_a_token_loss_of_the_model_itself_is_that_of_one_process(own_ranks, tmp_path):
    (alone, losses), (two, reported) = (
        run_through_and_killed(own_ranks, tmp_path / str(world), world, "tokens")
        for world in (1, 2)
    )
    for name, value in alone.items():
        # the model computes its loss in float32
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-8)
    assert [loss for *_, loss in reported] == pytest.approx([loss for *_, loss in losses], abs=1e-6)


def test_the_models_own_mean_is_another_one_on_two_processes(own_ranks, tmp_path):
    """As the page says; a resume is exact all the same."""
    (alone, _), (two, _) = (
        run_through_and_killed(own_ranks, tmp_path / str(world), world, "mean") for world in (1, 2)
    )
    assert max(float((two[name] - value).abs().max()) for name, value in alone.items()) > 1e-4
