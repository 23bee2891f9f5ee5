"""Backwards in two halves: gradients of inputs, and later those of weights."""
