"""Count what each process holds of the model under every strategy, after two steps; the fullest
process is shown.

python memory.py hparams.yaml --width=256 --depth=6
torchrun --standalone --nproc_per_node=2 memory.py hparams.yaml --width=256 --depth=6
"""

from train import Sorting, strings

import ddpkit

WAYS = ("ddp", "zero1", "fsdp")


def size(tensors):
    """Return how many megabytes of some tensors are in this process."""
    # of one that is sharded, its part
    own = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
    return sum(one.numel() * one.element_size() for one in own) / 1e6


class Counting(Sorting):
    def init_optimizers(self):
        super().init_optimizers()
        self.optimizer.register_step_pre_hook(self.count_gradients)

    def count_gradients(self, *_):
        self.gradients = size(one.grad for one in self.modules.parameters() if one.grad is not None)

    def on_stage_end(self, stage, stage_loss, epoch=None):
        states = [one for state in self.optimizer.state.values() for one in state.values()]
        self.megabytes = size(self.modules.parameters()), self.gradients, size(states)


def count(hparams, run_opts):
    processes = ddpkit.distributed.get_world_size()
    run_opts = {**run_opts, "global_batch_size": processes}  # few: what is counted is the same
    brain = Counting(hparams["modules"], hparams["opt_class"], hparams, run_opts)
    samples = strings(2 * processes, hparams["digits"], seed=1)
    brain.fit([1], samples)
    everybody = ddpkit.distributed.gather_objects(lambda: brain.megabytes)
    return [max(column) for column in zip(*everybody, strict=True)]


def main():
    hparams_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    processes = ddpkit.distributed.get_world_size()
    rows = [
        "| strategy | processes | parameters | gradients | optimizer state | together |",
        "|" + "---|" * 6,
    ]
    for way in WAYS if processes > 1 else ("single",):
        hparams = ddpkit.load_hparams(hparams_file, overrides)
        found = count(hparams, {**run_opts, "strategy": way})
        shown = " | ".join(f"{one:.1f} MB" for one in (*found, sum(found)))
        rows.append(f"| {way} | {processes} | {shown} |")
    if ddpkit.if_main_process():
        print("\n".join(rows))


if __name__ == "__main__":
    main()
