"""Rank 0's reports about a run: over HTTP while it runs, and in files on the workspace."""
