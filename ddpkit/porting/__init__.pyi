from ddpkit.porting.names import (
    PACKAGE as PACKAGE,
)
from ddpkit.porting.names import (
    TABLE as TABLE,
)
from ddpkit.porting.names import (
    ddpkit_module as ddpkit_module,
)
from ddpkit.porting.names import (
    ddpkit_name as ddpkit_name,
)
