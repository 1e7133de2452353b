"""The checks in the order in which they run and are shown, within one verdict."""

from __future__ import annotations

from ddpkit.see.doctor.check import EACH_RANK, TOGETHER, Check
from ddpkit.see.doctor.checks import (
    all_reduce,
    busy_cores,
    clocks,
    gpus,
    host_name,
    locked_memory,
    master_port,
    memory,
    mirror_folder,
    network_interfaces,
    object_store,
    open_files,
    output_folder,
    process_limit,
    processor_cores,
    reachability,
    recipe_loader,
    shared_folder,
    shared_memory,
    variables,
    versions,
)

CHECKS: tuple[Check, ...] = (
    Check("versions", versions.look, TOGETHER),
    Check("variables", variables.look, EACH_RANK),
    Check("processor cores", processor_cores.look, TOGETHER),
    Check("busy cores", busy_cores.look, TOGETHER),
    Check("memory", memory.look),
    Check("shared memory", shared_memory.look),
    Check("open files", open_files.look, EACH_RANK),
    Check("process limit", process_limit.look),
    Check("locked memory", locked_memory.look, EACH_RANK),
    Check("output folder", output_folder.look),
    Check("object store", object_store.look),
    Check("mirror", mirror_folder.look),
    Check("shared folder", shared_folder.look, TOGETHER),
    Check("host name", host_name.look),
    Check("network interfaces", network_interfaces.look, EACH_RANK),
    Check("next host", reachability.look, TOGETHER),
    Check("rendezvous port", master_port.look),
    Check("clock", clocks.look, TOGETHER),
    Check("GPUs", gpus.look, TOGETHER),
    Check("all-reduce", all_reduce.look, TOGETHER),
    Check("loader of the recipe", recipe_loader.look, TOGETHER),
)
