"""The cache of the cluster: watches fill it, and each object is kept as a few fields."""
