"""Records on a claim -> token sequences on the workspace -> batches: read, tokenize, pack, shards, batches, permutation."""
