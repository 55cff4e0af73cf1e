"""Effects on the cluster: the API client, the cache, gathering, executing, the lease, events and progress."""
