"""Measures of what a federation has learnt."""
