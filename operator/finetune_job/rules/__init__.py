"""The rule book: what is refused before anything starts, with field, value, reason and fix."""
