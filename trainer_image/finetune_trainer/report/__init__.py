"""The report of a run: one HTML page with everything that is known about it, and with answers of the base and the tuned model."""
