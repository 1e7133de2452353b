from ddpkit.config.command_line import (
    CommandLine as CommandLine,
)
from ddpkit.config.command_line import (
    read_command_line as read_command_line,
)
from ddpkit.config.options import (
    BATCHES as BATCHES,
)
from ddpkit.config.options import (
    GRADIENTS as GRADIENTS,
)
from ddpkit.config.options import (
    IN_RUN_OPTS as IN_RUN_OPTS,
)
from ddpkit.config.options import (
    IN_YAML as IN_YAML,
)
from ddpkit.config.options import (
    OPTION_BY_NAME as OPTION_BY_NAME,
)
from ddpkit.config.options import (
    OPTIONS as OPTIONS,
)
from ddpkit.config.options import (
    RUN_OPTIONS as RUN_OPTIONS,
)
from ddpkit.config.options import (
    OptionTypes as OptionTypes,
)
