"""Tasks that run in parallel with the passes: polls of training progress, the status of profiles, and relists."""
