"""A snapshot of every text that the library shows: a change of prose is one diff to read."""
