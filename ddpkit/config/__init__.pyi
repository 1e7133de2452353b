from ddpkit.config.command_line import (
    CommandLine as CommandLine,
    read_command_line as read_command_line,
)
from ddpkit.config.options import (
    BATCHES as BATCHES,
    GRADIENTS as GRADIENTS,
    IN_RUN_OPTS as IN_RUN_OPTS,
    IN_YAML as IN_YAML,
    OPTION_BY_NAME as OPTION_BY_NAME,
    OPTIONS as OPTIONS,
    RUN_OPTIONS as RUN_OPTIONS,
    OptionTypes as OptionTypes,
    parse_duration as parse_duration,
    warn_misspelt as warn_misspelt,
)
