from ddpkit.base.marks import (
    DEFAULT_LOAD_HOOKS as DEFAULT_LOAD_HOOKS,
)
from ddpkit.base.marks import (
    DEFAULT_SAVE_HOOKS as DEFAULT_SAVE_HOOKS,
)
from ddpkit.base.marks import (
    DEFAULT_TRANSFER_HOOKS as DEFAULT_TRANSFER_HOOKS,
)
from ddpkit.base.marks import (
    HOOKS_OF_ROLE as HOOKS_OF_ROLE,
)
from ddpkit.base.marks import (
    LoadHook as LoadHook,
)
from ddpkit.base.marks import (
    MethodHook as MethodHook,
)
from ddpkit.base.marks import (
    SaveHook as SaveHook,
)
from ddpkit.base.marks import (
    TransferHook as TransferHook,
)
from ddpkit.base.marks import (
    mark_as_loader as mark_as_loader,
)
from ddpkit.base.marks import (
    mark_as_saver as mark_as_saver,
)
from ddpkit.base.marks import (
    mark_as_transfer as mark_as_transfer,
)
from ddpkit.base.marks import (
    register_checkpoint_hooks as register_checkpoint_hooks,
)
from ddpkit.base.plain_yaml import (
    dump_plain_yaml as dump_plain_yaml,
)
from ddpkit.base.plain_yaml import (
    load_plain_yaml as load_plain_yaml,
)
from ddpkit.base.plain_yaml import (
    to_plain as to_plain,
)
from ddpkit.base.process_probe import (
    Guard as Guard,
)
from ddpkit.base.process_probe import (
    has_ended as has_ended,
)
from ddpkit.base.process_probe import (
    is_ending as is_ending,
)
from ddpkit.base.process_probe import (
    is_relative as is_relative,
)
from ddpkit.base.process_probe import (
    kill_later as kill_later,
)
from ddpkit.base.process_probe import (
    state_and_start as state_and_start,
)
from ddpkit.base.process_probe import (
    this_place as this_place,
)
from ddpkit.base.rank import (
    get_rank as get_rank,
)
from ddpkit.base.rank import (
    get_world_size as get_world_size,
)
from ddpkit.base.rank import (
    in_slurm_step as in_slurm_step,
)
from ddpkit.base.rank import (
    is_distributed_initialized as is_distributed_initialized,
)
from ddpkit.base.rank import (
    rank_if_known as rank_if_known,
)
from ddpkit.base.rank import (
    size as size,
)
from ddpkit.base.signals import (
    REPEAT_SECONDS as REPEAT_SECONDS,
)
from ddpkit.base.signals import (
    Interrupts as Interrupts,
)
from ddpkit.base.signals import (
    asked_twice as asked_twice,
)
from ddpkit.base.signals import (
    signal_named as signal_named,
)
