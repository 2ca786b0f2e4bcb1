"""Results for people: tables, curves and pictures."""
