"""What the starts of a local run cost."""
