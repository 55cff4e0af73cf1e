"""What commands read and make in a cluster, with the rights of the person at the keyboard."""
