"""What a run shows: the block at its start and the progress bar."""
