"""The rule book: what is refused before anything starts. Each finding has the field, the value, the reason and a fix."""
