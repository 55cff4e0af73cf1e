"""One pass over a job: gather what is observed, decide, and execute the decision."""
