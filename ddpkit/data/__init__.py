"""Which rank sees which sample: permutation, samplers, loaders, streams and their positions."""
