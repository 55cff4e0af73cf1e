"""What a run optimises: batches of records -> a loss that adds up over ranks and micro-steps."""
