"""A checkpoint is complete or not there: storage, index, hooks, writing in the background, and the lock."""
