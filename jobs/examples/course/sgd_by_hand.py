"""SGD by hand on four house prices, without and with accumulation of two gradients, checked against torch.optim.SGD.

    python jobs/examples/course/sgd_by_hand.py

The model is price = w * area + b, with area in 100 m2 and price in 100,000. The loss of a house is (prediction - price)
squared, so dw = 2 * error * area and db = 2 * error. Accumulation steps once for two houses, with their mean gradient.
"""

import torch

HOUSES = [(0.5, 1.5), (0.8, 2.0), (1.2, 3.5), (2.0, 5.0)]  # area, price
LR = 1e-3


def by_hand(accumulation: int) -> tuple[float, float]:
    """Train one epoch and print every step."""
    w = b = sum_dw = sum_db = 0.0
    for number, (area, price) in enumerate(HOUSES, 1):
        error = w * area + b - price
        dw, db = 2 * error * area, 2 * error
        sum_dw, sum_db = sum_dw + dw / accumulation, sum_db + db / accumulation
        line = f"house {number}  error {error:8.4f}  dw {dw:8.4f}  db {db:8.4f}"
        if number % accumulation == 0:
            w, b = w - LR * sum_dw, b - LR * sum_db
            sum_dw = sum_db = 0.0
            line += f"  step: w {w:.6f}  b {b:.6f}"
        print(line)
    return w, b


def by_torch(accumulation: int) -> tuple[float, float]:
    """Do the same with autograd and torch.optim.SGD."""
    parameters = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # w, b
    optimizer = torch.optim.SGD([parameters], lr=LR)
    for number, (area, price) in enumerate(HOUSES, 1):
        loss = (parameters[0] * area + parameters[1] - price) ** 2
        torch.autograd.backward(loss / accumulation)
        if number % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    w, b = parameters.tolist()
    return w, b


def main() -> None:
    """Compare both, without and with accumulation."""
    for accumulation in (1, 2):
        print(f"a step every {accumulation} house(s)")
        pairs = zip(by_hand(accumulation), by_torch(accumulation), strict=True)
        print(f"torch.optim.SGD differs by {max(abs(mine - theirs) for mine, theirs in pairs):.0e}")


if __name__ == "__main__":
    main()
