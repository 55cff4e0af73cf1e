"""Carries out changes on rows of a matrix, with exactly PEFT's bits on a CPU. There is a module for each kind of change."""
