"""Turns records on a claim into token sequences on the workspace, and these into batches."""
