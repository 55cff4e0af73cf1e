"""What only the real model and the real data can tell, found on a CPU before any GPU is held."""
