"""What these pages add to Sphinx."""
