"""The operator: watches FineTuneJobs, decides what comes next for each, and carries it out."""
