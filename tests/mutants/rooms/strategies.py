"""Faults in what differs between the ways to run: DDP, FSDP2, ZeRO-1, local SGD, virtual ranks."""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

UNIT = "tests/strategies/test_strategies.py"
DDP = "tests/ranks/test_ddp_options.py tests/ranks/test_gradients_that_ddp_leaves.py"
FSDP = (
    "tests/ranks/test_fsdp.py::test_the_same_answer "
    "tests/ranks/test_fsdp.py::test_what_cannot_be_divided_is_an_error_on_every_rank "
    "tests/ranks/test_fsdp.py::test_ranks_that_use_other_blocks_are_told_before_anything_is_saved"
)
ZERO1 = (
    "tests/ranks/test_zero1.py::test_zero1_has_the_bits_of_ddp_and_the_numbers_of_one_process "
    "tests/ranks/test_zero1.py::test_gradients_that_are_not_averaged_are_refused "
    "tests/ranks/test_zero1.py::test_a_state_that_is_not_whole_is_not_given_away "
    "tests/ranks/test_zero1.py::test_a_run_goes_on_from_a_checkpoint_of_zero1_and_from_one_of_ddp"
)
LOCAL_SGD = (
    "tests/ranks/test_local_sgd.py::test_averages_after_every_step_of_plain_sgd_are_ddp "
    "tests/ranks/test_local_sgd.py::test_weights_and_moments_are_those_of_ranks_simulated_by_hand "
    "tests/ranks/test_local_sgd.py::test_nothing_is_saved_while_the_weights_are_not_the_same"
)
RANKS = "tests/ranks/test_virtual_ranks.py"
VIRTUAL = (
    "tests/ranks/test_virtual_ranks.py::test_what_cannot_work_is_refused_by_name "
    "tests/ranks/test_virtual_ranks.py::test_a_shard_without_a_sample_counts_nothing "
    "tests/ranks/test_virtual_ranks.py::test_noise_in_a_prediction_and_in_what_follows_is_the_same "
    "tests/ranks/test_virtual_ranks.py::test_the_same_bits_on_one_process_and_on_two"
)
VIRTUAL_FSDP = (
    "tests/ranks/test_virtual_fsdp.py::test_the_bits_are_those_of_one_process_that_has_everything"
)
WITHOUT_GRAPH = (
    "tests/ranks/test_losses_without_graph.py "
    "tests/ranks/test_losses_without_graph_of_batch_norm.py"
)
CHOOSING = "tests/strategies/test_choosing.py"
MODEL = "tests/model/test_model.py"

BUFFERS = "tests/ranks/test_buffers_between_steps.py"

FAULTS = in_room(
    "strategies",
    UNIT,
    [
        Fault(
            "states of zero1 that lie in memory in another order lose it in a shard",
            "_has_rows",
            "value.is_contiguous()",
            "True",
            "tests/ranks/test_zero1.py::test_what_a_shard_cannot_hold_is_sent",
        ),
        Fault(
            "each rank has the shapes of its own states alone when it saves with zero1",
            "DividedOptimizer.in_shards",
            "self._collected(own, lambda told: told)",
            "own",
            "tests/ranks/test_zero1.py::test_each_rank_writes_the_states_that_it_owns",
        ),
        Fault(
            "sums of losses are not kept in the range of gradients that travel in fp16",
            "DDP.bind",
            'options.ddp_comm_hook == "fp16"',
            "False",
            "tests/ranks/test_ddp_options.py::test_a_large_sum_fits_into_fp16",
        ),
        Fault(
            "gradients that DDP has left out are averaged over one rank too many",
            "average_gradients",
            "flat /= torch.distributed.get_world_size(group)",
            "flat /= torch.distributed.get_world_size(group) + 1",
            DDP,
        ),
        Fault(
            "a parameter that no rank used gets a gradient of zeros",
            "average_gradients",
            "if anywhere:\n    own.copy_(average.view_as(own))\n    parameter.grad = own",
            "own.copy_(average.view_as(own))\nparameter.grad = own",
            DDP,
        ),
        Fault(
            "two processes exchange gradients and do not divide them",
            "_average_of_pair",
            "own.div_(2)",
            "pass",
            "tests/ranks/test_arithmetic.py tests/ranks/test_same_answer.py",
        ),
        Fault(
            "--no_sync of a recipe stays on after the block",
            "SwitchedAttribute.__exit__",
            "setattr(owner, self._name, before)",
            "pass",
            f"{UNIT} tests/ranks/test_own_fit_batch.py {DDP}",
        ),
        Fault(
            "the count of a window with sums is not averaged but added up",
            "RareQuestions.start_average",
            "total / torch.distributed.get_world_size()",
            "total",
            "tests/ranks/test_arithmetic.py",
        ),
        Fault(
            "ranks begin with weights of their own",
            "send_from_main",
            "_messages(tensors)",
            "[]",
            f"{UNIT} {FSDP} {MODEL}",
        ),
        Fault(
            "each buffer is a message of its own",
            "_messages",
            "type(tensor) in PACKABLE",
            "False",
            "tests/strategies/test_sending.py",
        ),
        Fault(
            "frozen weights differ between ranks",
            "DDP.wrap",
            "broadcast_from_main(module, self.device)",
            "pass",
            f"{UNIT} "
            "tests/ranks/test_brain.py::test_what_is_not_trained_is_not_wrapped_and_the_same_ever"
            "ywhere",
        ),
        Fault(
            "parameters that only an optimizer knows are not averaged",
            "DDP.finish_gradients",
            "average_gradients(others)",
            "pass",
            "tests/ranks/test_outside_parameters.py",
        ),
        Fault(
            "weights that differ between ranks are not told",
            "DDP.diverged_entries",
            "max(sizes) - min(sizes) > APART * max(sizes)",
            "max(sizes) - min(sizes) < 0",
            "tests/ranks/test_own_fit_batch.py tests/ranks/test_ddp_options.py",
        ),
        Fault(
            "ranks that use other entries of modules are not told",
            "DDP.end_pass",
            "len(set(distributed.exchange(self._order, site='entries'))) > 1",
            "not distributed.exchange(self._order, site='entries')",
            f"{DDP} tests/ranks/test_own_fit_batch.py",
        ),
        Fault(
            "after a step that is skipped PowerSGD keeps what is not finite",
            "DDP.forget_errors",
            "hook.forget()",
            "pass",
            "tests/ranks/test_ddp_options.py",
        ),
        Fault(
            "gradients that are zero on all ranks stay",
            "drop_if_all_are_without",
            "ranks == module.process_group.size()",
            "False",
            WITHOUT_GRAPH,
        ),
        Fault(
            "several entries that share a parameter are not refused",
            "refuse_shared_parameters",
            "other[0] != entry",
            "False",
            f"{UNIT} tests/contract/test_bad_input.py",
        ),
        Fault(
            "options that exclude each other are taken",
            "_refuse_two",
            "refuse_with(known.chosen_by, options, {'strategy': f'{known.alone}{_also(able)}'})",
            "pass",
            f"{UNIT} tests/unit/test_run_opts.py",
        ),
        Fault(
            "--strategy=single is taken where a launcher has started several",
            "SingleDevice.check",
            "world_size > 1",
            "False",
            f"{UNIT} tests/ranks/test_usage_errors.py",
        ),
        Fault(
            "each rank clips its own gradients before they are averaged",
            "_average_of_pair",
            "own.div_(2)",
            "own.div_(2 * (own.norm() / 0.1).clamp(min=1.0))",
            MODEL,
        ),
        Fault(
            "a strategy from outside goes beside one that an option chooses",
            "_refuse_two",
            "options.strategy not in (AUTO, name, *able)",
            "False",
            CHOOSING,
        ),
        Fault(
            "a strategy that has no work in one process is used there",
            "choose_strategy",
            "strategy.runs_alone() or several",
            "True",
            f"{UNIT} {CHOOSING}",
        ),
        Fault(
            "one object is the strategy of two Brains",
            "choose_strategy",
            "vars(strategy)[_BOUND] = True",
            "pass",
            CHOOSING,
        ),
        Fault(
            "what a strategy from outside keeps is not saved",
            "RankState._strategy_state",
            "{**states, 'strategy': known} if known else states",
            "states",
            "tests/strategies/test_own_strategy.py",
        ),
        Fault(
            "averages of other tensors than the other ranks have are made",
            "average_over_ranks",
            "largest != -smallest",
            "False",
            "tests/strategies/test_own_strategy.py",
            hangs=True,
        ),
        Fault(
            "zero1 leaves out the first parameter of a rank",
            "DividedOptimizer._plan",
            "[[parameter for parameter in group if self._is_mine(parameter)] for group in groups]",
            "[[parameter for parameter in group if self._is_mine(parameter)][1:] "
            "for group in groups]",
            MODEL,
        ),
        Fault(
            "buffers of virtual ranks are those of one shard where no optimizer steps",
            "VirtualRanks.leave_step_out",
            "self.finish_gradients()",
            "pass",
            BUFFERS,
        ),
        Fault(
            "gradients of two parameters that share their memory are added up twice",
            "_apart",
            "memory.data_ptr() in known or memory.nbytes() != gradient.nbytes",
            "False",
            f"{VIRTUAL} {RANKS}::test_gradients_in_the_same_memory_are_added_up_once",
        ),
        Fault(
            "gradients of virtual ranks are clipped by squares that each rank has added up",
            "VirtualFSDP.bind",
            "self.norm_of_parts = norm_of_parts",
            "self.norm_of_parts = None",
            VIRTUAL_FSDP,
        ),
        Fault(
            "shards with several batches are added to each other before they are complete",
            "VirtualFSDP._taking",
            "self.has_own_fit_batch or not self._adds_at_once",
            "False",
            VIRTUAL_FSDP,
        ),
        Fault(
            "each rank evaluates the buffers that it has moved by itself",
            "DDP.evaluating",
            "send_from_main(module.module.buffers())",
            "pass",
            BUFFERS,
        ),
        Fault(
            "buffers of an entry without parameters are each rank's own",
            "UnwrappedBuffers.send",
            "self._send(module for module in self.modules if module.training)",
            "pass",
            BUFFERS,
        ),
        Fault(
            "ranks that step alone are alike where only their buffers have moved",
            "LocalSGD.leave_step_out",
            "self.weights_differ = True",
            "pass",
            BUFFERS,
        ),
        Fault(
            "a rank without a loss makes no step of post-local SGD",
            "LocalSGD._add_zeros",
            "not has_gradients(module)",
            "False",
            "tests/ranks/test_skipped_batches.py",
        ),
    ],
)
