"""What the generators choose from."""
