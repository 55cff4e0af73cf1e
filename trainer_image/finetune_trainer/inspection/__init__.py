"""Inspection of a base model: its files, structure and weights, the use of its modules, and preflight's report about it."""
