"""The rehearsal: a job tried in under a minute on a small twin of its model, by the real trainer, on two CPU ranks."""
