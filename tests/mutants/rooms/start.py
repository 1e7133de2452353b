"""Faults in what comes before a run, and in what stands beside it."""

from __future__ import annotations

from tests.mutants.fault import Fault, in_room

LOADER = "tests/unit/test_dataloader.py"
AUGMENTATION = "tests/unit/test_augmentation.py"
LAUNCHERS = "tests/launch/test_launchers.py"
SYNCBN = "tests/ranks/test_syncbn.py tests/unit/test_syncbn.py"
YAML = "tests/unit/test_hparams.py"

LOADERS = in_room(
    "dataloader",
    LOADER,
    [
        Fault(
            "a loader's workers are seeded alike in each epoch",
            "SaveableDataLoader.set_epoch",
            "mix_key(global_seed() or 0, epoch) >> 1",
            "mix_key(global_seed() or 0, 1) >> 1",
        ),
        Fault(
            "a resumed loader yields what was consumed",
            "SaveableDataLoader.__iter__",
            "plan.skip = skip",
            "pass",
        ),
        Fault(
            "a loader without a plan is resumed one batch too early",
            "SaveableDataLoader.__iter__",
            "itertools.islice(inner, skip, None)",
            "itertools.islice(inner, skip - 1, None)",
        ),
        Fault(
            "the position counts what workers have made ready",
            "SaveableDataLoader._counted",
            "own['yielded'] = number",
            "own['yielded'] = number + 2 * self.num_workers",
        ),
        Fault(
            "a nominal epoch has a batch too many",
            "LoopedLoader.__next__",
            "self.step >= self.epoch_length",
            "self.step > self.epoch_length",
        ),
        Fault(
            "each pass of a looped loader has the same order",
            "LoopedLoader._next_pass",
            "set_epoch(self.loader, self._passes)",
            "set_epoch(self.loader, 1)",
        ),
        Fault(
            "a resumed looped loader begins its pass anew",
            "LoopedLoader._go_to",
            "self._passes, self._skip = divmod(self.total_steps, max(len(self.loader), 1))",
            "self._passes = self.total_steps // max(len(self.loader), 1)",
        ),
        Fault(
            "a recipe's DistributedSampler is divided again",
            "_is_divided",
            "isinstance(inner, DistributedSampler) or is_sharded(inner)",
            "is_sharded(inner)",
        ),
        Fault(
            "drop_last of an evaluation leaves samples out",
            "_with_all_samples",
            "options['drop_last'] = False",
            "pass",
            f"{LOADER} tests/contract/test_evaluation_drops_nothing.py",
        ),
    ],
)

SAMPLES = in_room(
    "augmentation",
    AUGMENTATION,
    [
        Fault(
            "random numbers of a sample depend on its place in the batch",
            "KeyedBatch.key",
            "mix(self.base ^ index_number(self.indices[place]))",
            "mix(self.base ^ place)",
        ),
        Fault(
            "random numbers of a sample are the same in each epoch",
            "KeyedSampler.__iter__",
            "mix_key(place.seed, epoch)",
            "mix_key(place.seed, 1)",
        ),
        Fault(
            "loading a sample moves the global random streams",
            "KeyedDataset.__getitem__",
            "if has_moved:\n    _STREAMS.restore(before)",
            "pass",
        ),
        Fault(
            "a dataset in a worker does not hear of the next epoch",
            "KeyedDataset.__getitem__",
            "set_epoch_inside(self.dataset, batch.epoch)",
            "pass",
        ),
        Fault(
            "collating draws what the first sample has drawn",
            "KeyedBatch.key",
            "mix(first ^ _COLLATE) if place == _COLLATING else first",
            "first",
        ),
    ],
)

SEEDS = in_room(
    "seed",
    "tests/unit/test_seed.py",
    [
        Fault(
            "a random stream of a rank does not depend on the rank",
            "seed_epoch_streams",
            "get_rank() or 0 if rank is None else rank",
            "0",
            "tests/unit/test_seed.py tests/ranks/test_seed.py",
        ),
        Fault(
            "numpy is not seeded",
            "_seed_python_and_numpy",
            "np.random.seed(seed & MAX_SEED)",
            "pass",
        ),
        Fault(
            "a saved random state leaves Python's out",
            "restore_rng_state",
            "random.setstate((version, tuple(words), gauss_next))",
            "pass",
        ),
        Fault(
            "randomness of one's own goes on in the global stream",
            "own_randomness",
            "random.setstate(python)",
            "pass",
        ),
    ],
)

NORMS = in_room(
    "syncbn",
    SYNCBN,
    [
        Fault(
            "ranks with fewer rows weigh as much in the batch statistics",
            "_join",
            "(means * counts).sum(0) / total",
            "means.mean(0)",
        ),
        Fault(
            "the variance leaves out what differs between the ranks",
            "_join",
            "(squares + counts * (means - mean).square()).sum(0) / total",
            "squares.sum(0) / total",
        ),
        Fault(
            "the running variance is the biased one",
            "SyncBatchNorm._update_running",
            "joined.var * (joined.total / (joined.total - 1))",
            "joined.var",
        ),
    ],
)

DEVICES = in_room(
    "device",
    "tests/unit/test_device.py",
    [
        Fault(
            "all ranks of a machine take its first GPU",
            "_own_index",
            "0 if sees_own_alone(kind, info) else info.local_rank",
            "0",
        ),
        Fault(
            "a GPU that is not there is taken",
            "resolve_device",
            "index is not None and index >= count",
            "False",
        ),
        Fault(
            "sums are kept in double precision where a device has none",
            "widest_float",
            "torch.float32 if str(device).startswith('mps') else torch.float64",
            "torch.float64",
        ),
    ],
)

PRECISION = in_room(
    "precision",
    "tests/unit/test_precision.py",
    [
        Fault(
            "fp16 is taken on a CPU",
            "Precision.__init__",
            "device_type == 'cpu' and value is torch.float16",
            "False",
        ),
        Fault(
            "an optimizer that steps twice in a window is unscaled twice",
            "StepScaler.unscale_",
            "id(optimizer) not in self._unscaled_now",
            "True",
            "tests/unit/test_precision.py",
        ),
        Fault(
            "inputs in double precision are cast down",
            "_cast",
            "isinstance(value, torch.Tensor) and value.is_floating_point() "
            "and (value.dtype is not torch.float64)",
            "isinstance(value, torch.Tensor) and value.is_floating_point()",
        ),
    ],
)

OPTIONS = in_room(
    "options",
    "tests/unit/test_run_opts.py tests/unit/test_run_opts_table.py",
    [
        Fault(
            "the word `off` switches an option on",
            "to_bool",
            "word in _TRUE",
            "word in _TRUE or word == 'off'",
            "tests/unit/test_command_line.py",
        ),
        Fault(
            "a value below the least one is taken",
            "Option.coerce",
            "self.minimum is not None and converted < self.minimum",
            "False",
        ),
        Fault(
            "a choice that there is not is taken",
            "Option._require_choice",
            "set(converted if is_list else (converted,)) <= set(self.choices)",
            "True",
        ),
        Fault(
            "90m are 90 seconds",
            "parse_duration",
            "float(number['number']) * _UNITS[number['unit'] or 's']",
            "float(number['number'])",
            "tests/run/test_stop_control.py",
        ),
        Fault(
            "an option that is not given a value is on",
            "_value",
            "option.type is bool and (not argument.values)",
            "not argument.values",
            "tests/unit/test_command_line.py",
        ),
        Fault(
            "a number of the YAML may be replaced by a word",
            "require_same_kind",
            "not _is_plain_text(value)",
            "True",
            "tests/unit/test_overrides.py tests/unit/test_command_line.py",
        ),
    ],
)

LAUNCH = in_room(
    "launch",
    LAUNCHERS,
    [
        Fault(
            "MASTER_PORT is the same for each run of a machine",
            "derived_port",
            "FIRST_DERIVED_PORT + int.from_bytes(digest, 'big') % DERIVED_PORTS",
            "FIRST_DERIVED_PORT",
        ),
        Fault(
            "a rank that is not below the number of ranks is taken",
            "checked_places",
            "places[small] >= places[large]",
            "places[small] > places[large]",
        ),
        Fault(
            "under torchrun the node is the rank",
            "_from_torch_variables",
            "count(environ, 'GROUP_RANK', node_rank)",
            "rank",
        ),
        Fault(
            "the first host of a Slurm list is the list",
            "_first_host",
            "re.sub('\\\\[(\\\\d+)[^]]*\\\\]', '\\\\1', name[0])",
            "name[0]",
        ),
        Fault(
            "mpirun that deals ranks out in turn is taken for one by nodes",
            "_from_mpi",
            "not one_node and (rank - local_rank) % on_node",
            "False",
        ),
        Fault(
            "one process on each of several nodes trains alone",
            "refuse_lonely_node",
            "node is not None",
            "False",
            "tests/launch/test_platforms.py",
        ),
        Fault(
            "in a PyTorchJob the number of processes is taken for that of the nodes",
            "numbers_nodes",
            "find_node(environ) or _kubeflow(environ)",
            "None",
            "tests/launch/test_platforms.py",
        ),
        Fault(
            "a number of a node that is not below that of the nodes is taken",
            "Node.check",
            "int(self.rank) < self.most",
            "True",
            "tests/launch/test_platforms.py",
        ),
        Fault(
            "--nproc starts a run of its own on each of several nodes",
            "become_torchrun",
            "node.options(number) if node is not None else _alone(number)",
            "_alone(number)",
            "tests/launch/test_platforms.py",
        ),
        Fault(
            "two platforms that say different things are not compared",
            "find_node",
            "other.num_nodes != first.num_nodes or len(ranks) > 1",
            "False",
            "tests/launch/test_platforms.py",
        ),
        Fault(
            "a process that a rank starts inherits its place",
            "without_launch",
            "not tells_rank(name)",
            "True",
            "tests/launch/test_child_processes.py",
        ),
    ],
)

RECIPES = in_room(
    "recipe_yaml",
    YAML,
    [
        Fault(
            "a key that is there twice is taken",
            "_check_keys",
            "earlier is not key",
            "False",
        ),
        Fault(
            "an override of an unknown key is taken",
            "check_overrides",
            "key.value not in known",
            "False",
        ),
        Fault(
            "a placeholder that was not replaced is taken",
            "_check_placeholders",
            "node.tag == '!PLACEHOLDER'",
            "False",
        ),
        Fault(
            "an override of a mapping takes its other keys away",
            "_merged",
            "_updated(old[1], new[1], here)",
            "new[1]",
            f"{YAML} tests/unit/test_command_line.py",
        ),
        Fault(
            "arguments that a class does not take are found when it is made",
            "argument_problem",
            "unknown is not None",
            "False",
        ),
    ],
)

OTHERS = [
    *in_room(
        "batch",
        "tests/unit/test_batch.py",
        [
            Fault(
                "relative lengths are those of the whole batch",
                "batch_pad_right",
                "length / longest if longest else 1.0",
                "1.0",
            ),
            Fault(
                "tensors are padded on the left",
                "batch_pad_right",
                "[*behind, 0, longest - length]",
                "[*behind, longest - length, 0]",
            ),
            Fault(
                "numbers of a batch lose their decimals",
                "_stacked",
                "torch.float64 if any((isinstance(value, float) for value in values)) else None",
                "torch.int64",
            ),
        ],
    ),
    *in_room(
        "epoch_loop",
        "tests/unit/test_epoch_loop.py",
        [
            Fault(
                "a resumed counter begins with the epoch after the one that was cut",
                "EpochCounter._go_on_from",
                "epoch if is_done else max(epoch - 1, 0)",
                "epoch",
            ),
            Fault(
                "a stopper's patience is one epoch longer",
                "EpochCounterWithStopper._is_exhausted",
                "self._epochs_without_improvement(epoch) >= max(self.limit_to_stop, 1)",
                "self._epochs_without_improvement(epoch) > max(self.limit_to_stop, 1)",
            ),
            Fault(
                "a stopper's direction is reversed",
                "EpochCounterWithStopper._is_improvement",
                "self.direction == 'min'",
                "self.direction == 'max'",
            ),
            Fault(
                "epochs of the warm-up count for stopping",
                "EpochCounterWithStopper.update_metric",
                "metric is None or self.current <= self.limit_warmup",
                "metric is None",
            ),
        ],
    ),
    *in_room(
        "experiment",
        "tests/unit/test_experiment.py",
        [
            Fault(
                "two runs write into one experiment folder",
                "_lock_folder",
                "lock.acquire()",
                "pass",
            ),
            Fault(
                "--test_only writes over the files of the training",
                "_write_files",
                "keep and target.exists()",
                "False",
            ),
            Fault(
                "the saved hyperparameters are without the overrides",
                "_resolved_hyperparams",
                "resolve_references(file, own)",
                "resolve_references(file, None)",
            ),
        ],
    ),
    *in_room(
        "profiler",
        "tests/unit/test_profiler.py",
        [
            Fault(
                "the profile records the warm-up",
                "prepare_profiler",
                "schedule(wait=0, warmup=profile_warmup, active=profile_steps, repeat=1)",
                "schedule(wait=0, warmup=0, active=profile_warmup + profile_steps, repeat=1)",
            ),
        ],
    ),
    *in_room(
        "compat",
        "tests/compat/test_compat.py",
        [
            Fault(
                "the norm of all gradients is the largest of theirs",
                "norm_of_all",
                "torch.linalg.vector_norm(torch.stack(at_once(tensors, 2.0)))",
                "torch.stack(at_once(tensors, 2.0)).max()",
                "tests/compat/test_compat.py tests/unit/test_optim.py",
            ),
            Fault(
                "the backward pass loses the weight of the loss",
                "back_propagate",
                "engine((loss,), (weight,), bool(retain_graph), False, (), "
                "allow_unreachable=True, accumulate_grad=True)",
                "engine((loss,), (torch.ones_like(weight),), bool(retain_graph), False, (), "
                "allow_unreachable=True, accumulate_grad=True)",
                "tests/compat/test_back_propagate.py tests/training/test_loop_train_step.py",
            ),
        ],
    ),
    *in_room(
        "cli",
        "tests/cli/test_checkpoint_commands.py",
        [
            Fault(
                "`ckpt ls` lists the oldest checkpoint first",
                "newest_first",
                "sorted(found, key=lambda row: (row.saved, row.path.name), reverse=True)",
                "sorted(found, key=lambda row: (row.saved, row.path.name))",
            ),
            Fault(
                "`ckpt show` of a damaged checkpoint ends with success",
                "command_show",
                "1 if row.reasons else 0",
                "0",
            ),
        ],
    ),
    *in_room(
        "parity",
        "tests/parity/test_causes.py",
        [
            Fault(
                "the parity check calls gradients equal that differ",
                "Diagnosis._equal",
                "max(compare(found, expected).values()) <= self.tolerance",
                "True",
            ),
            Fault(
                "a gradient that one side lacks counts as equal",
                "_distance",
                "gradient is None or other is None",
                "False",
                "ddpkit/parity/causes.py",
            ),
            Fault(
                "dropout is on in the parity check",
                "without_noise",
                "setattr(layer, rate, 0.0)",
                "pass",
                "tests/parity/test_side_noise.py tests/parity/test_causes.py",
            ),
        ],
    ),
]

JOB_FILES = in_room(
    "cli",
    "tests/cli/test_kubernetes.py",
    [
        Fault(
            "Kubernetes puts a variable into a word of the recipe",
            "_literal",
            'text.replace("$", "$$")',
            "text",
        ),
        Fault(
            "a word of the recipe that looks like a number becomes one for other readers of YAML",
            "scalar",
            "not _DOUBTFUL.match(text)",
            "True",
        ),
        Fault(
            "a PyTorchJob waits for all of its nodes",
            "job_file",
            "options.min_nodes or options.nodes",
            "options.nodes",
        ),
    ],
)

FAULTS = [
    *JOB_FILES,
    *LOADERS,
    *SAMPLES,
    *SEEDS,
    *NORMS,
    *DEVICES,
    *PRECISION,
    *OPTIONS,
    *LAUNCH,
    *RECIPES,
    *OTHERS,
]
