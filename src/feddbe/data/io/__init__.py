"""Files: downloads, archives, caches, formats."""
