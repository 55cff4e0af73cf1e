"""The cache of cluster objects, filled by watches. Only a few fields of each object are kept."""
