"""Data sets that feddbe knows by name."""
