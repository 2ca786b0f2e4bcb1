"""A run: what it is made from, its rounds, and its file."""
