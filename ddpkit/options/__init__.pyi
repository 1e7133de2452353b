from ddpkit.options.option import (
    IN_FIT as IN_FIT,
    IN_RUN_OPTS as IN_RUN_OPTS,
    IN_YAML as IN_YAML,
    MADE as MADE,
    ON_COMMAND_LINE as ON_COMMAND_LINE,
    PREPARED as PREPARED,
    READING as READING,
    WRAPPED as WRAPPED,
    Option as Option,
)
from ddpkit.options.table import (
    NUMBERS as NUMBERS,
    OF_SLICES as OF_SLICES,
    OPTION_BY_NAME as OPTION_BY_NAME,
    OPTIONS as OPTIONS,
    PARSER_ONLY as PARSER_ONLY,
    RUN_OPTIONS as RUN_OPTIONS,
    STRATEGY as STRATEGY,
    OptionTypes as OptionTypes,
)
from ddpkit.options.values import (
    parse_duration as parse_duration,
)
