"""User data: arrays, tables, image folders, Hugging Face."""
