"""The training loop, which runs in one process per rank under the supervisor."""
