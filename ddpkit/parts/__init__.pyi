from ddpkit.parts.averaged_weights import AveragedWeights as AveragedWeights
from ddpkit.parts.early_stopping import EarlyStopping as EarlyStopping
from ddpkit.parts.events import PartEvents as PartEvents, parts_of as parts_of
from ddpkit.parts.hash_chain import CHAIN_VERSION as CHAIN_VERSION, chained as chained
from ddpkit.parts.kubeflow_progress import KubeflowProgress as KubeflowProgress
from ddpkit.parts.own import own_parts as own_parts
from ddpkit.parts.part import Part as Part
from ddpkit.parts.validation_schedule import ValidationSchedule as ValidationSchedule
from ddpkit.parts.yaml_help import help_of_yaml as help_of_yaml
