"""What users and administrators write, and what the operator answers: FineTuneJob, FineTuneProfile and their status."""
