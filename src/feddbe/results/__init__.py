"""What runs come to, read from their files."""
