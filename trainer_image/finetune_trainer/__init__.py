"""The programs that run in the pods of a job, one after the other: fetch, preflight, train, merge and publish."""
