"""What a run is made from."""
