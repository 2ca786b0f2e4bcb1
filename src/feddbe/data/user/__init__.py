"""The user's own data: arrays, tables, folders, Hugging Face."""
