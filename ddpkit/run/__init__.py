"""One run from its start to its end: what Brain does in fit, evaluate and predict around the loops."""
