"""Starting, bounding and ending processes."""
