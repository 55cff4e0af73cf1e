"""Inspects a base model: its files, structure, weights and the use of its modules. Also defines preflight's report."""
