"""What every other package may import, and what imports none of them."""
