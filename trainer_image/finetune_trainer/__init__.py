"""The programs in the pods of a job: fetch, preflight, train, merge and publish, one after the other."""
