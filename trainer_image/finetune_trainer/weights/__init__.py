"""Weights on disk: headers, element types, and the names in each model type. Used by merge, verify, model and checkpoint."""
