"""What a base model is: its files, structure and weights, how its modules are used, and the report that preflight leaves of
it.
"""
