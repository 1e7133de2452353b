"""What `benchmarks/planted_delays.py` runs: cases, a recipe with a fault in it, a busy machine."""
