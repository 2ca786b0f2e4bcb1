"""Studies: many runs that belong together, and what they come to.

`cells.py` says what is run, `runner.py` runs what is missing of it; `reproduce.py` and `tune.py` are studies.
"""
