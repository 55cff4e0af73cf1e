"""Carries out changes on rows of a matrix, bit-identical to PEFT on a CPU. There is a module for each kind of change."""
