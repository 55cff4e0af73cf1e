"""Requests of commands to a cluster, with the rights of the person at the keyboard."""
