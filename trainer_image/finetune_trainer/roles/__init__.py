"""What each pod of a job runs, a module a role, and the commands that run parts of it outside a job. Only these know all others."""
