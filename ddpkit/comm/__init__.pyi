from ddpkit.comm.agreement import (
    check_train_data as check_train_data,
)
from ddpkit.comm.agreement import (
    data_facts as data_facts,
)
from ddpkit.comm.agreement import (
    model_facts as model_facts,
)
from ddpkit.comm.agreement import (
    optimizer_facts as optimizer_facts,
)
from ddpkit.comm.agreement import (
    option_facts as option_facts,
)
from ddpkit.comm.agreement import (
    require_agreement as require_agreement,
)
from ddpkit.comm.agreement import (
    together as together,
)
from ddpkit.comm.consistency import (
    recipe_facts as recipe_facts,
)
from ddpkit.comm.consistency import (
    script_facts as script_facts,
)
from ddpkit.comm.consistency import (
    software_facts as software_facts,
)
from ddpkit.comm.mailbox import (
    Outcome as Outcome,
)
from ddpkit.comm.mailbox import (
    call_path as call_path,
)
from ddpkit.comm.mailbox import (
    call_site as call_site,
)
from ddpkit.comm.mailbox import (
    outside_frame as outside_frame,
)
from ddpkit.comm.mailbox import (
    raise_as_reader as raise_as_reader,
)
from ddpkit.comm.process_group import (
    AFTER_WATCH_SECONDS as AFTER_WATCH_SECONDS,
)
from ddpkit.comm.process_group import (
    init_group as init_group,
)
from ddpkit.comm.process_group import (
    longest_wait as longest_wait,
)
from ddpkit.comm.process_group import (
    set_hang_limits as set_hang_limits,
)
from ddpkit.comm.process_group import (
    shorten_timeout as shorten_timeout,
)
from ddpkit.comm.runtime import (
    control_group as control_group,
)
from ddpkit.comm.runtime import (
    group_state as group_state,
)
