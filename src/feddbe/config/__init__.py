"""Options of runs, their limits and defaults, and code in users' files."""
