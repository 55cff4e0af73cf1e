"""The checks that need the real model or the real data; they run on a CPU before any GPU is held."""
