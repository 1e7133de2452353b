from ddpkit.mirror.command_paths import copied_down as copied_down, named_in_store as named_in_store
from ddpkit.mirror.given_paths import local_file as local_file
from ddpkit.mirror.local_folder import mirror_place as mirror_place
from ddpkit.mirror.mirror import (
    Mirror as Mirror,
)
from ddpkit.mirror.mirrors import (
    forget_mirrors as forget_mirrors,
    mirror_holding as mirror_holding,
    mirror_of as mirror_of,
)
