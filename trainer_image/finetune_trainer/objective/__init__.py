"""The objective of a run, which computes from batches of records a loss that adds up over ranks and micro-steps."""
