"""The model-based test: drawn trainings, compared with a plain loop of torch that has no ddpkit in
it.
"""
