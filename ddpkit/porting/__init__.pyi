from ddpkit.porting.answers import (
    ANSWERED as ANSWERED,
    VARIABLE as VARIABLE,
    environment as environment,
    install as install,
    is_switched_off as is_switched_off,
)
from ddpkit.porting.differences import (
    DIFFERENCES as DIFFERENCES,
)
from ddpkit.porting.names import (
    PACKAGE as PACKAGE,
    TABLE as TABLE,
    ddpkit_module as ddpkit_module,
    ddpkit_name as ddpkit_name,
)
from ddpkit.porting.recipes import (
    PortedFile as PortedFile,
    PortedRecipe as PortedRecipe,
    port_recipe as port_recipe,
    write_recipe as write_recipe,
)
from ddpkit.porting.source_code import (
    Note as Note,
    port_python as port_python,
    port_yaml as port_yaml,
)
