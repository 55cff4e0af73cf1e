"""The stages of a job, and what stops it."""
