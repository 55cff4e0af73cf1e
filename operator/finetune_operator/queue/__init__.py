"""The work queue of jobs, with deadlines and pauses."""
