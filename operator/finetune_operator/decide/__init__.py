"""The pure core of the operator: it takes what is observed and returns what is to be done. Nothing here touches a cluster."""
