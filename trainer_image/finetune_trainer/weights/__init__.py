"""Weights on disk, shared by merge, verify, model and checkpoint: headers, element types, and the names of each model type."""
