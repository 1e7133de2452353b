from ddpkit.porting.differences import (
    DIFFERENCES as DIFFERENCES,
)
from ddpkit.porting.names import (
    PACKAGE as PACKAGE,
    TABLE as TABLE,
    ddpkit_module as ddpkit_module,
    ddpkit_name as ddpkit_name,
)
from ddpkit.porting.python_code import (
    port_python as port_python,
)
from ddpkit.porting.recipes import (
    PortedFile as PortedFile,
    PortedRecipe as PortedRecipe,
    port_recipe as port_recipe,
    port_yaml as port_yaml,
    write_recipe as write_recipe,
)
from ddpkit.porting.text import (
    Change as Change,
    Note as Note,
)
