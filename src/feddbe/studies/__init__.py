"""Studies: many runs that belong together, and what they come to.

`runner.py` runs what is missing of a study; `sweep.py`, `reproduce.py` and `tune.py` are studies.
"""
