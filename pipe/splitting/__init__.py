"""Split backwards into two halves: gradients of inputs first, gradients of weights later."""
