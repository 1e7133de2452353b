"""Other libraries' starters, with the files that `docs/how-to/other-starters.md` shows."""
