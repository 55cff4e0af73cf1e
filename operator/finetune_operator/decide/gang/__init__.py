"""Attempts of a gang: their records, size, restarts, progress and GPU seconds."""
