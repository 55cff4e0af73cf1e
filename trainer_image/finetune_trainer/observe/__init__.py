"""What rank 0 tells about a run: over HTTP while it runs, and in files beside the artifacts."""
