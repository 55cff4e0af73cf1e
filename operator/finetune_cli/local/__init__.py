"""Local mode: the plan of a job as processes of this machine."""
