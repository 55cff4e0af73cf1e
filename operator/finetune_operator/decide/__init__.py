"""The pure core of the operator: it takes the observed state and returns the actions to take. Nothing here touches a cluster."""
