"""Jobs of a cluster as plain data, and what is concluded from them. Nothing here reads a cluster, a file or the clock."""
