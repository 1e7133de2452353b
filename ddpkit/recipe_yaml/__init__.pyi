from ddpkit.recipe_yaml.construction import (
    construct as construct,
)
from ddpkit.recipe_yaml.document import (
    Document as Document,
    key_of as key_of,
    pairs as pairs,
    read_document as read_document,
    with_overrides as with_overrides,
)
from ddpkit.recipe_yaml.named_modules import (
    named_module_files as named_module_files,
)
from ddpkit.recipe_yaml.named_objects import (
    UnusableNameError as UnusableNameError,
    find_object as find_object,
)
from ddpkit.recipe_yaml.references import (
    look_up as look_up,
    target as target,
    whole_reference as whole_reference,
)
from ddpkit.recipe_yaml.replaced_values import (
    override_values as override_values,
)
from ddpkit.recipe_yaml.scratch_output import (
    output_folder_of as output_folder_of,
    with_output_folder as with_output_folder,
    with_scratch_output as with_scratch_output,
)
from ddpkit.recipe_yaml.static_checks import (
    check_overrides as check_overrides,
    check_references as check_references,
)
