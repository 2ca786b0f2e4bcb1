"""Studies: many runs that belong together.

`runner.py` executes missing runs, and `study_record.py` remembers a study. `sweep.py`, `reproduce.py` and
`tune.py` are studies.
"""
