"""The training loop: one process per rank, run under the supervisor."""
