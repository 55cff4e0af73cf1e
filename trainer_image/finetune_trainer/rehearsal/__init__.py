"""The rehearsal: a job tried in under a minute on a scaled-down model, by the real trainer, on two CPU ranks."""
