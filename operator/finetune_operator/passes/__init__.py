"""One pass over a job: observe, decide, and execute the decision."""
