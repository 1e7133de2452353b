"""What ``python -m ddpkit diff`` is made of."""
