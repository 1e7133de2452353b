"""Variables of the environment that make a run slow, each with what it costs; and those that differ
between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ddpkit.base import spans
from ddpkit.see.doctor.check import Site
from ddpkit.see.doctor.finding import LOOK, OK, PROBLEM, Finding
from ddpkit.see.doctor.ranks import answering

NCCL_PAGE = "docs.nvidia.com/deeplearning/nccl, Environment Variables"
TORCH_PAGE = "docs.pytorch.org/docs/stable, distributed and torch_environment_variables"
CUDA_PAGE = "docs.nvidia.com/cuda/cuda-c-programming-guide, CUDA Environment Variables"
PYTHON_PAGE = "docs.python.org/3/using/cmdline.html"
GLIBC_PAGE = "mallopt(3)"
OPENMP_PAGE = "gcc.gnu.org/onlinedocs/libgomp, Environment Variables"

MUST_BE_EQUAL = ("NCCL_", "TORCH_", "GLOO_", "OMP_", "CUBLAS_", "PYTORCH_")
MAY_DIFFER = (
    "_IFNAME",
    "_HCA",
    "_DIR",
    "_FILE",
    "_PATH",
    "_HOME",
    "_CACHE",
)  # of each host or rank


def is_on(value: str) -> bool:
    """Say whether a switch is on.

    Args:
        value: of a variable.

    Ranks: local.

    Example:
        >>> is_on("1"), is_on("0"), is_on("")
        (True, False, False)
    """
    return value.strip().lower() not in {"", "0", "false", "no", "off", "n", "f"}


@dataclass(frozen=True)
class Rule:
    """A variable that hurts.

    Attributes:
        name: of the variable.
        hurts: whether a value does.
        cost: what it costs.
        source: who says so.
        for_gpus: whether it matters with GPUs alone.
        is_problem: whether a run is far slower by it, or fails.
        for_several: whether it matters with several processes alone.

    Ranks: local.

    Example:
        >>> Rule("NCCL_DEBUG", is_on, "many lines", NCCL_PAGE).is_problem
        False
    """

    name: str
    hurts: Callable[[str], bool]
    cost: str
    source: str
    for_gpus: bool = False
    is_problem: bool = False
    for_several: bool = False


def _is_off(value: str) -> bool:
    return not is_on(value)


def _is_one_of(*words: str) -> Callable[[str], bool]:
    return lambda value: value.strip().upper() in words


def _is_set(value: str) -> bool:
    return bool(value.strip())


def _is_no_number(value: str) -> bool:
    words = [word.strip() for word in value.split(",")]
    return not all(word.isdecimal() and int(word) > 0 for word in words)


BY_HAND = "NCCL's own choice for this machine is switched off; often left over from another one"

RULES: tuple[Rule, ...] = (
    Rule(
        "NCCL_P2P_DISABLE",
        is_on,
        "GPUs of one host talk through its memory and not over NVLink or PCIe: several times "
        "slower",
        NCCL_PAGE,
        for_gpus=True,
        is_problem=True,
        for_several=True,
    ),
    Rule(
        "NCCL_IB_DISABLE",
        is_on,
        "hosts talk over sockets although there may be InfiniBand: about ten times slower",
        NCCL_PAGE,
        for_gpus=True,
        for_several=True,
    ),
    Rule(
        "NCCL_SHM_DISABLE",
        is_on,
        "processes of one host talk over the network's sockets where GPUs have no direct way",
        NCCL_PAGE,
        for_gpus=True,
        is_problem=True,
        for_several=True,
    ),
    Rule(
        "NCCL_DEBUG",
        _is_one_of("INFO", "TRACE"),
        "hundreds of lines from each rank at the start; TRACE writes in each collective",
        NCCL_PAGE,
        for_gpus=True,
        for_several=True,
    ),
    Rule(
        "NCCL_CHECK_POINTERS",
        is_on,
        "each collective checks its buffers",
        NCCL_PAGE,
        for_gpus=True,
    ),
    Rule("NCCL_ALGO", _is_set, BY_HAND, NCCL_PAGE, for_gpus=True, for_several=True),
    Rule("NCCL_PROTO", _is_set, BY_HAND, NCCL_PAGE, for_gpus=True, for_several=True),
    Rule("NCCL_MAX_NCHANNELS", _is_set, BY_HAND, NCCL_PAGE, for_gpus=True, for_several=True),
    Rule("NCCL_NTHREADS", _is_set, BY_HAND, NCCL_PAGE, for_gpus=True, for_several=True),
    Rule("NCCL_BUFFSIZE", _is_set, BY_HAND, NCCL_PAGE, for_gpus=True, for_several=True),
    Rule(
        "NCCL_NET_GDR_LEVEL",
        _is_one_of("0", "LOC"),
        "GPUs send to other hosts through the memory of this one",
        NCCL_PAGE,
        for_gpus=True,
        for_several=True,
    ),
    Rule(
        "NCCL_NVLS_ENABLE",
        _is_off,
        "sums inside of NVSwitch are switched off: all-reduce is slower on such machines",
        NCCL_PAGE,
        for_gpus=True,
        for_several=True,
    ),
    Rule(
        "CUDA_LAUNCH_BLOCKING",
        is_on,
        "the host waits for each kernel: nothing overlaps, often half the speed",
        CUDA_PAGE,
        for_gpus=True,
        is_problem=True,
    ),
    Rule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        _is_one_of("1"),
        "gradients and computing share one queue of the GPU: FSDP overlaps them less",
        CUDA_PAGE,
        for_gpus=True,
    ),
    Rule(
        "CUDA_CACHE_DISABLE",
        is_on,
        "kernels are compiled again at each start",
        CUDA_PAGE,
        for_gpus=True,
    ),
    Rule(
        "NVIDIA_TF32_OVERRIDE",
        _is_one_of("0"),
        "matrix products in float32 are up to eight times slower, whatever torch is told",
        CUDA_PAGE,
        for_gpus=True,
    ),
    Rule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        is_on,
        "each tensor is allocated by the driver, which waits for the GPU: many times slower",
        TORCH_PAGE,
        for_gpus=True,
        is_problem=True,
    ),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        _is_one_of("DETAIL"),
        "ranks compare each collective before it starts: several times slower with small ones",
        TORCH_PAGE,
        is_problem=True,
        for_several=True,
    ),
    Rule(
        "TORCH_NCCL_BLOCKING_WAIT",
        is_on,
        "the host waits for each collective: nothing overlaps with it (pytorch/pytorch issue "
        "50820)",
        TORCH_PAGE,
        for_gpus=True,
        is_problem=True,
        for_several=True,
    ),
    Rule(
        "NCCL_BLOCKING_WAIT",
        is_on,
        "the host waits for each collective: nothing overlaps with it (pytorch/pytorch issue "
        "50820)",
        TORCH_PAGE,
        for_gpus=True,
        is_problem=True,
        for_several=True,
    ),
    Rule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _is_one_of("0"),
        "a collective that fails or hangs does not end its process",
        TORCH_PAGE,
        for_gpus=True,
        for_several=True,
    ),
    Rule(
        "TORCH_NCCL_DESYNC_DEBUG",
        is_on,
        "each collective writes to the store of the launch",
        TORCH_PAGE,
        for_gpus=True,
        for_several=True,
    ),
    Rule(
        "TORCH_NCCL_ENABLE_TIMING",
        is_on,
        "each collective records two events more",
        TORCH_PAGE,
        for_gpus=True,
        for_several=True,
    ),
    Rule(
        "TORCH_CPP_LOG_LEVEL",
        _is_one_of("INFO"),
        "torch writes lines in C++ at each turn",
        TORCH_PAGE,
    ),
    Rule(
        "TORCH_SHOW_CPP_STACKTRACES",
        is_on,
        "each error of torch reads the symbols of its libraries, which takes seconds",
        TORCH_PAGE,
    ),
    Rule(
        "TORCHDYNAMO_DISABLE",
        is_on,
        "torch.compile does nothing",
        TORCH_PAGE,
    ),
    Rule("TORCH_COMPILE_DISABLE", is_on, "torch.compile does nothing", TORCH_PAGE),
    Rule(
        "OMP_NUM_THREADS",
        _is_no_number,
        "the value is no number, and is ignored: all cores are taken by each process",
        OPENMP_PAGE,
    ),
    Rule(
        "OMP_PROC_BIND",
        _is_one_of("TRUE", "CLOSE", "MASTER", "PRIMARY"),
        "the threads of all processes may be bound to the same cores",
        OPENMP_PAGE,
        for_several=True,
    ),
    Rule(
        "GOMP_CPU_AFFINITY",
        _is_set,
        "the threads of all processes are bound to the same cores",
        OPENMP_PAGE,
        for_several=True,
    ),
    Rule(
        "KMP_AFFINITY",
        lambda value: "compact" in value or "proclist" in value,
        "the threads of all processes are bound to the same cores",
        OPENMP_PAGE,
        for_several=True,
    ),
    Rule("PYTHONDEVMODE", is_on, "Python checks each allocation, and warns of more", PYTHON_PAGE),
    Rule(
        "PYTHONMALLOC",
        lambda value: "debug" in value,
        "Python checks each allocation",
        PYTHON_PAGE,
    ),
    Rule(
        "PYTHONTRACEMALLOC",
        is_on,
        "Python keeps a stack for each allocation: about half the speed of the host's code",
        PYTHON_PAGE,
    ),
    Rule(
        "PYTHONPROFILEIMPORTTIME",
        is_on,
        "each process writes a line for each module that it imports",
        PYTHON_PAGE,
    ),
    Rule(
        "PYTHONDUMPREFS",
        is_on,
        "a Python that is built for it keeps a list of all objects",
        PYTHON_PAGE,
    ),
    Rule("MALLOC_CHECK_", is_on, "the C library checks each allocation", GLIBC_PAGE),
    Rule("MALLOC_PERTURB_", is_on, "the C library fills each allocation", GLIBC_PAGE),
    Rule(
        "MALLOC_ARENA_MAX",
        _is_one_of("1"),
        "threads wait for each other at each allocation",
        GLIBC_PAGE,
    ),
    Rule(
        "LD_PRELOAD",
        lambda value: any(
            word in value for word in ("asan", "tsan", "ubsan", "valgrind", "faketime")
        ),
        "a library that checks or changes each call stands before the C library",
        "ld.so(8)",
    ),
)


def look(site: Site) -> Iterator[Finding]:
    """Look at the variables of each rank, and compare those that must be equal.

    Ranks: collective.
    """
    environ = site.machine.environ
    hurting = [rule for rule in RULES if rule.name in environ and rule.hurts(environ[rule.name])]
    told = [_finding(rule, site) for rule in hurting]
    yield from told
    if not told:
        yield Finding(
            "variables",
            OK,
            f"none of {len(RULES)} that hurt is set",
            "none",
            "the pages of torch, NCCL, CUDA, OpenMP and Python",
        )
    yield from _differences(site)


def _finding(rule: Rule, site: Site) -> Finding:
    value = site.machine.environ[rule.name]
    here = ""
    if rule.for_gpus and site.run.device != "cuda":
        here = " (here nothing: there is no GPU)"
    elif rule.for_several and site.run.launch.world_size == 1:
        here = " (here nothing: there is one process)"
    return Finding(
        rule.name,
        PROBLEM if rule.is_problem and not here else LOOK,
        f"{rule.name}={value}",
        "not set",
        rule.source,
        cost=f"{rule.cost}{here}",
        advice=f"unset {rule.name}, unless you are looking for a fault with it.",
    )


def _differences(site: Site) -> Iterator[Finding]:
    environ = site.machine.environ
    own = {
        name: value
        for name, value in environ.items()
        if name.startswith(MUST_BE_EQUAL) and not name.endswith(MAY_DIFFER)
    }
    everybody = answering(site.ranks.exchange("variables", own))
    names = sorted({name for variables in everybody.values() for name in variables})
    different = {name: _groups(name, everybody) for name in names}
    different = {name: groups for name, groups in different.items() if len(groups) > 1}
    if different:
        shown = "; ".join(f"{name}: {_shown(groups)}" for name, groups in different.items())
        yield Finding(
            "equal variables",
            LOOK,
            shown,
            "the same on all ranks",
            "NCCL, gloo and torch read them on each rank by itself",
            cost="ranks may choose different ways, and wait for each other for ever",
            advice="Export them in the script that starts all ranks (mpirun -x, srun "
            "--export=ALL).",
        )


def _groups(
    name: str,
    everybody: dict[int, Any],
) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, variables in everybody.items():
        groups.setdefault(variables.get(name, "not set"), []).append(rank)
    return groups


def _shown(groups: dict[str, list[int]]) -> str:
    return ", ".join(f"{value} on rank {spans(ranks)}" for value, ranks in groups.items())
