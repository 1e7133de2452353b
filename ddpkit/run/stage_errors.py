"""What is said of an exception inside a stage: the cause in the recipe, its line, and what to
do.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ddpkit.base import note_line_of
from ddpkit.compat import is_recompile_limit, requiring_compiled_code
from ddpkit.errors import BatchError, DataError, DdpkitError
from ddpkit.logger import get_logger
from ddpkit.run.memory_report import is_out_of_memory
from ddpkit.strategies import NO_CONTEXT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from ddpkit.run.memory_report import MemoryReport
    from ddpkit.run_opts import RunOptions
    from ddpkit.strategies import Strategy

logger = get_logger(__name__)

OF_TORCH = (RuntimeError, ValueError, MemoryError)
MIXED_SAYS = "mixed torch.Tensor and DTensor"  # in torch 2.13
MIXED = (
    'A weight that is divided over the ranks met a whole tensor: "{}". '
    "With --strategy=fsdp, or fully_shard in a recipe, weights are whole only inside of a forward "
    "pass. Call an entry of modules, self.modules.net(inputs), and not a layer of it; for another "
    "method than forward see torch.distributed.fsdp.register_fsdp_forward_method. Compute what "
    "needs a weight, such as a penalty, in the forward of the module that has it, and return it "
    "with the outputs."
)
OUT_OF_MEMORY = (
    "Out of memory. In training, --auto_micro_batch cuts the global batch into parts that fit."
)
ONE_VALUE_SAYS = "Expected more than 1 value per channel when training"  # in torch 2.13
ONE_VALUE = (
    "{}: batch normalization has no variance over a batch of one row. Often it is the last batch "
    "of an epoch: give drop_last=True in train_loader_kwargs, or a larger batch; or call eval() "
    "of the module."
)


@contextlib.contextmanager
def explaining(
    brain: Any,
    options: RunOptions,
    strategy: Strategy,
    memory: MemoryReport,
) -> Iterator[None]:
    """Return a context in which errors of torch that come from the way of running say what to do.

    An error about what a hook has returned is given the line of this hook. Where no bit depends on
    the number of processes, torch may not stop compiling in the middle of a stage.

    Args:
        brain: whose hooks run.
        options: of the run.
        strategy: of the run.
        memory: tells what took the memory, after an out-of-memory error.
    """
    try:
        with _compiling(strategy):
            yield
    except DdpkitError as error:
        if isinstance(error, BatchError) and error.hook:
            note_line_of(error, getattr(brain, error.hook, None))
        raise
    except Exception as error:
        if not _may_be_of_torch(error):
            raise
        if is_out_of_memory(error):
            memory.tell(error)
        has_no_answer = options.auto_micro_batch or strategy.unrepeatable
        if isinstance(error, torch.OutOfMemoryError) and not has_no_answer:
            logger.warning(OUT_OF_MEMORY, main_process_only=False)
        news = _explained(error) or strategy.explain(error)
        if news is None:
            raise
        raise news from error


def _compiling(strategy: Strategy) -> AbstractContextManager[None]:
    # a stage, and not a run: another Brain of this process may not care
    return requiring_compiled_code() if strategy.has_same_bits() else NO_CONTEXT


def _may_be_of_torch(error: Exception) -> bool:
    # the compiler's own error is a plain Exception
    return isinstance(error, OF_TORCH) or is_recompile_limit(error)


def _explained(error: Exception) -> DdpkitError | None:
    text = str(error)
    if MIXED_SAYS in text:
        return BatchError(MIXED.format(text.partition(",")[0]))
    if ONE_VALUE_SAYS in text:
        return DataError(ONE_VALUE.format(text.rstrip(".")))
    return None
