"""Faults in who sees which sample, in which order, and in what is random about it."""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

PLAN = "tests/data/test_plan.py tests/data/test_plan_order.py"
STREAMS = "tests/data/test_streams.py"
LOADER = "tests/unit/test_dataloader.py"
SAMPLER = "tests/unit/test_sampler.py"
SETS = "tests/data/test_several_sets.py"

DATA = in_room(
    "data",
    PLAN,
    [
        Fault(
            "the order of samples is the same in every epoch",
            "Order.__init__",
            "mix_key(seed, epoch)",
            "mix_key(seed, 1)",
        ),
        Fault(
            "the order of samples does not depend on the seed",
            "Order.__init__",
            "mix_key(seed, epoch)",
            "mix_key(0, epoch)",
        ),
        Fault(
            "some samples come twice and others never",
            "Order.at",
            "values[outside] = self._encrypt(values[outside])",
            "values[outside] %= np.uint64(self.num_samples)",
        ),
        Fault(
            "every rank takes the same share of a global batch",
            "SamplingPlan.share",
            "part(stop - start, self.world_size, rank)",
            "part(stop - start, self.world_size, 0)",
        ),
        Fault(
            "the remainder of a global batch goes to no rank",
            "part",
            "(start, start + each + (1 if number < more else 0))",
            "(start, start + each)",
        ),
        Fault(
            "the last sample of an epoch is left out",
            "SamplingPlan._span",
            "min(self.global_batch_size, self.num_samples - start)",
            "min(self.global_batch_size, self.num_samples - start - 1)",
            "tests/model/test_model.py",
        ),
        Fault(
            "drop_last keeps the last batch",
            "SamplingPlan.__len__",
            "self._pieces(rest) if rest and (not self.drop_last) else 0",
            "self._pieces(rest) if rest else 0",
        ),
        Fault(
            "an epoch goes on one batch too early",
            "SamplingPlan.batch_after",
            "self.done_before(batch + 1) <= samples",
            "self.done_before(batch + 1) < samples",
        ),
        Fault(
            "a sampler is not told of the next epoch",
            "RankBatchSampler.set_epoch",
            """
            self.epoch = epoch
            self._drawn = None
            self._repeats = None
            """,
            "pass",
        ),
        Fault(
            "batches that were consumed are read again after a resume",
            "PlannedBatchSampler.__iter__",
            "self._batches(skip)",
            "self._batches(0)",
        ),
        Fault(
            "after a resume the next epoch begins in its middle, too",
            "PlannedBatchSampler.__iter__",
            """
            skip = self.skip
            self.skip = 0
            """,
            "skip = self.skip",
        ),
        Fault(
            "a repeated sample of an epoch draws the same random numbers",
            "count_repeats",
            "seen[number] = counts[-1] + 1",
            "seen[number] = 0",
            f"{PLAN} tests/unit/test_augmentation.py",
        ),
        Fault(
            "a user's batches are dealt to the first ranks only",
            "DealtBatchSampler._own",
            "self.mine[shard]",
            "shard",
        ),
        Fault(
            "a sampler without an end fills the memory",
            "draw_alike",
            "len(drawn) > most",
            "False",
        ),
        Fault(
            "the epoch reaches the outer sampler only",
            "set_epoch_inside",
            "if getattr(inner, 'passes_epoch_on', False):\n    return",
            "return",
            f"{PLAN} {SAMPLER}",
        ),
        Fault(
            "each rank reads all shards of a stream",
            "StreamShard._own_shard",
            "self.whole.shard(number, index)",
            "self.whole.shard(number, 0)",
            STREAMS,
        ),
        Fault(
            "workers of a stream read the same blocks",
            "StreamShard._dealt",
            "block % workers == worker",
            "True",
            STREAMS,
        ),
        Fault(
            "a stream that is dealt out loses the items of its last block",
            "StreamShard._dealt",
            "read < self.block_size and self.drop_last",
            "read < self.block_size",
            STREAMS,
        ),
        Fault(
            "a stream's random order is the same in each epoch",
            "StreamShard.__iter__",
            "mix_key(self.seed, int(self.epoch), _BATCHES if self.of_batches else READ)",
            "mix_key(self.seed, 1, _BATCHES if self.of_batches else READ)",
            f"{STREAMS}",
        ),
        Fault(
            "reading a stream moves the global random streams",
            "Reading.__exit__",
            "self._swap()",
            "pass",
            STREAMS,
        ),
        Fault(
            "a generator that can be read once is taken for training",
            "_problem",
            "is_iterator and is_read_again",
            "False",
            "tests/contract/test_unusable_data.py",
        ),
        Fault(
            "a user's sampler draws differently on each rank",
            "draw_alike",
            "mix_key(seed, epoch, 56993)",
            "mix_key(torch.initial_seed(), epoch, 56993)",
            f"{PLAN} tests/ranks/test_samplers.py",
        ),
        Fault(
            "ranks with other data are not told",
            "require_alike",
            "None in digests or len(set(digests)) == 1 or first is None",
            "True",
            "tests/data/test_sample_comparison.py tests/ranks/test_likeness.py",
        ),
        Fault(
            "splits that differ between ranks are not seen",
            "selection_facts",
            "f'{len(selected)} of digest {digest}'",
            "f'{len(selected)}'",
            "tests/data/test_selection.py tests/ranks/test_splits.py",
        ),
        Fault(
            "a short set comes again in the order of its first pass",
            "SetPasses.sample",
            "Order(self.size, self.seed, turn)",
            "Order(self.size, self.seed, 0)",
            SETS,
        ),
        Fault(
            "mixed sets begin anew in each epoch",
            "MixedSets.find",
            "(self.epoch - 1) * self.counts[self.names[number]]",
            "0",
            SETS,
        ),
        Fault(
            "a block of positions has numbers of an earlier one",
            "SetOrder._in_block",
            "start + count",
            "start",
            SETS,
        ),
        Fault(
            "the batches of joint sets are collated as lists of items",
            "_choose_collate",
            "options.get('collate_fn') in {None, default_collate}",
            "options.get('collate_fn') is None",
            SETS,
        ),
    ],
)

SAMPLERS = in_room(
    "sampler",
    SAMPLER,
    [
        Fault(
            "a random sampler draws the same in each epoch",
            "_OfEpoch.__iter__",
            "mix_key(self.seed, self.epoch) >> 1",
            "self.seed",
        ),
        Fault(
            "a sampler's second round through the data is its first",
            "ReproducibleRandomSampler._ordered",
            "mix_key(self.seed, number) if number else self.seed",
            "self.seed",
        ),
        Fault(
            "parts of a concatenated dataset overlap",
            "ConcatDatasetBatchSampler.__init__",
            "drawn_from[:-1]",
            "drawn_from[1:]",
        ),
        Fault(
            "batches by length exceed the length that is allowed",
            "DynamicBatchSampler.__init__",
            "int(min(limit, max(1.0, max_batch_length / boundary)))",
            "int(min(limit, max(1.0, max_batch_length / boundary))) + 1",
        ),
        Fault(
            "batches by length come in the same order in each epoch",
            "DynamicBatchSampler.__iter__",
            "self._made is None or self._made[0] != self.epoch",
            "self._made is None",
        ),
        Fault(
            "rare classes are drawn as often as they occur",
            "BalancingDataSampler.__init__",
            "1.0 / counts[class_]",
            "1.0",
        ),
    ],
)

ROW_FILES = in_room(
    "row_files",
    "tests/row_files/test_row_files.py",
    [
        Fault(
            "rows that come in another order than that of the set stay so",
            "SortedWriter._flush",
            "np.argsort(chunk.indices, kind='stable')",
            "np.arange(len(chunk.indices))",
        ),
        Fault(
            "a merge goes on before all rows up to an index are known",
            "_by_index",
            "min((int(head.indices[-1]) for head in heads))",
            "max((int(head.indices[-1]) for head in heads))",
        ),
        Fault(
            "the items of a stream are counted anew in each batch",
            "stream_places",
            "np.arange(start, start + count)",
            "np.arange(count)",
            "tests/ranks/test_predictions_in_files.py",
        ),
        Fault(
            "files of another number of processes stay beside the new ones",
            "PredictionPath.others",
            "int(match[1]) != world_size",
            "int(match[1]) == world_size",
            "tests/ranks/test_predictions_in_files.py",
        ),
    ],
)

FAULTS = [*DATA, *SAMPLERS, *ROW_FILES]
