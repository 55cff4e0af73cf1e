"""Requests that commands send to a cluster, with the user's own permissions."""
