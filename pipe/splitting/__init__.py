"""Split backwards in two halves: gradients of inputs first, gradients of weights later."""
