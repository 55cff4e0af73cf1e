"""The Lease that lets one replica work."""
