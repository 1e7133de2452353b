"""Drawn trainings whose last bit may depend on neither the strategy nor the number of processes,
nor on a kill: ``python -m tests.model --same_bits``.
"""
