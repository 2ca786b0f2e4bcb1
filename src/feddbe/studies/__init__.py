"""Studies: many runs that belong together.

`runner.py` executes missing runs; `sweep.py`, `reproduce.py` and `tune.py` are studies.
"""
