"""The stages of a job, and what can stop them."""
