"""The objective of a run: batches of records -> a loss that adds up over ranks and micro-steps."""
