"""The operator: watches FineTuneJobs, decides the next actions for each, and carries them out."""
