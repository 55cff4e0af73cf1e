"""Turns records on a claim into token sequences on the workspace, and those sequences into batches."""
