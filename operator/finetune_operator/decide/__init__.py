"""The pure core of the operator: what is observed goes in, what is to be done comes out. Nothing here touches a cluster."""
