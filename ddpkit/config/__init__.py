"""The options of a run: one table, the command line, and which source wins."""
