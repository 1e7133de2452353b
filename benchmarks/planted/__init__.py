"""What `benchmarks/planted_delays.py` runs: cases, a recipe that has a fault planted, and a busy machine."""
