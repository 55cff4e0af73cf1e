"""The report of a run: one HTML page with everything about it, and answers of the base and the tuned model."""
