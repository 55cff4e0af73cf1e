"""The report of a run: one HTML page with everything that a person asks of it, and answers of the base and the tuned model."""
