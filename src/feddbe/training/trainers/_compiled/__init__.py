"""The compiled trainer's parts. What is compiled imports numba, and is imported only where it is used."""
