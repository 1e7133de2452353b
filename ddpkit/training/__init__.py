"""One step and the loops around it: strategy, feed, epoch loop, stages, and results of all ranks."""
