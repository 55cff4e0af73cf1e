"""Copies the results to where they are used; the only role with credentials to write. The way in is `publish.run.publish`."""
