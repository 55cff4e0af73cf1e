"""Inspects a base model: its files, structure and weights, the use of its modules; and has preflight's report about it."""
