"""A loop of one's own, made of ddpkit's parts. The weights are those of with_brain.py, to the last
bit.

    python train.py hparams.yaml                                        one process
    torchrun --standalone --nproc_per_node=2 train.py hparams.yaml      two

hparams.yaml says what is trained, for both scripts.
"""

import torch
from spirals import spirals
from torch.nn.functional import cross_entropy

import ddpkit
from ddpkit.dataloader import Sharding, plan_of, shard
from ddpkit.distributed import get_world_size
from ddpkit.metrics import Accuracy, Mean, counted_by
from ddpkit.optim import take_step
from ddpkit.strategies import make_strategy
from ddpkit.training import Feed, Window


def train(net, loader, optimizer, hparams, device):
    """Make one step for each batch of all processes; return the mean loss over their samples."""
    net.train()
    mean = Mean()
    # says of each batch what it weighs: this process's samples, among those of all
    window = Window()
    feed = Feed(loader, len(loader), plan_of(loader), world_size=get_world_size())
    for points, arms in feed.batches(window):
        # nothing, where a batch has fewer samples than there are processes
        with counted_by(window):
            loss = cross_entropy(net(points.to(device)), arms.to(device))
            mean.update(loss.detach(), window.count)
        (loss * window.scale).backward()  # here DDP averages the gradients
        take_step([optimizer], hparams["max_grad_norm"])
    return mean.compute(reduce=True)


@torch.no_grad()
def evaluate(net, loader, device):
    """Return the mean loss over the samples of all processes, and their accuracy."""
    net.eval()
    mean = Mean()
    accuracy = Accuracy()
    for points, arms in loader:
        scores = net(points.to(device))
        labels = arms.to(device)
        mean.update(cross_entropy(scores, labels), len(labels))
        accuracy.update(scores, labels)
    return {"loss": mean.compute(reduce=True), "accuracy": accuracy.compute(reduce=True)}


def main():
    hparams_file, run_opts, overrides = ddpkit.parse_arguments()
    ddpkit.ddp_init_group(run_opts)
    hparams = ddpkit.load_hparams(hparams_file, overrides)
    ddpkit.create_experiment_directory(hparams["output_folder"], hparams_file, overrides)

    modules = torch.nn.ModuleDict({"net": hparams["net"]}).to(run_opts.device)
    make_strategy(run_opts.device).wrap(modules)  # DDP, and a batch norm over all processes
    optimizer = hparams["opt_class"](modules.parameters())
    checkpointer = hparams["checkpointer"]
    checkpointer.add_recoverable("optimizer", optimizer)
    checkpointer.recover_if_possible()

    part = Sharding.of_this_rank(global_batch_size=hparams["global_batch_size"])
    train_loader = shard(spirals(1000, seed=1), part, shuffle=True)
    # no process need have as many batches as the others
    part = Sharding.of_this_rank(keep_step=False)
    valid_loader = shard(spirals(300, seed=2), part, batch_size=hparams["evaluation_batch_size"])
    for epoch in hparams["epoch_counter"]:
        train_loader.set_epoch(epoch)
        loss = train(modules["net"], train_loader, optimizer, hparams, run_opts.device)
        stats = evaluate(modules["net"], valid_loader, run_opts.device)
        hparams["train_logger"].log_stats({"epoch": epoch}, {"loss": loss}, stats)
        checkpointer.save_and_keep_only(meta=stats, max_keys=["accuracy"])


if __name__ == "__main__":
    main()
