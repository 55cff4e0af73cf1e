"""How fast the operator is: a burst, a life, a restart, a cluster full of pending pods, and an API server that goes away."""
