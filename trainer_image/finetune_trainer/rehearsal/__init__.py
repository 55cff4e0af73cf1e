"""The rehearsal: the real trainer tries a job in under a minute on a scaled-down model, on two CPU ranks."""
