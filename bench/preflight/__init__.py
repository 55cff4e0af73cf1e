"""What looking at a large model before it is trained takes."""
