"""Handles weights on disk: headers, element types, and each model type's names. Used by merge, verify, model and checkpoint."""
