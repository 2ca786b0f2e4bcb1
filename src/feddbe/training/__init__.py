"""A client's local training: a `FitPlan` is a fit as a value, and backends execute it."""
