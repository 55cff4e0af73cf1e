"""Local mode: runs the plan of a job as processes on this machine."""
