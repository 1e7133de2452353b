"""What ``python -m ddpkit estimate`` is made of."""
