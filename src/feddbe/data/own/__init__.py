"""A user's own data, in the forms people have it."""
