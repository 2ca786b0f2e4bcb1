"""Results of runs: documents, seeds, statistics, curves and fairness, without output."""
