"""Files as publishers have them: where they are, how they get there, how they are read safely."""
