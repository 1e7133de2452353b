"""What ``python -m ddpkit lr-find`` is made of."""
