"""Copies the results to where they are used; the only role with credentials to write. The entry point is
`publish.run.publish`.
"""
