"""The operator between every pair of its writes killed, and in every kind of bad weather, on a real control plane."""
