"""What becomes of a job when something breaks under it, on real nodes: one case for each kind of failure.

`python -m tests.e2e.failures` (`make failures`) runs all of them and prints the table; `--only NAME` runs some.
"""
