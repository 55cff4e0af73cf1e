"""The checks that need the real model or the real data. They run on a CPU before a GPU is allocated."""
