"""The objective of a run. Its losses on batches of records can be summed over ranks and micro-steps."""
