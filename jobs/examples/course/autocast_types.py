"""Run a module under autocast, and print the dtypes of its parameters, outputs, loss and gradients.

    python jobs/examples/course/autocast_types.py [FILE.py:NAME] [--input 4,5] [--dtype float16] [--device cuda]

NAME is a function or class without arguments that returns a module of one floating-point tensor. On a CPU, the last
column states the rule for CUDA: matrix products and convolutions run in the 16-bit type; layer norm, group norm,
softmax and losses in float32; other operations in the type of their inputs. CPU autocast keeps layer norm in 16 bits.
"""

import argparse
import runpy

import torch
from torch import Tensor, nn

IN_16_BITS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd)
IN_32_BITS = (nn.LayerNorm, nn.GroupNorm, nn.Softmax, nn.LogSoftmax, nn.modules.loss._Loss)


class ToyModel(nn.Module):
    """Two linear layers with a layer norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(5, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, 5) to logits (batch, 3)."""
        logits: Tensor = self.fc2(self.ln(torch.relu(self.fc1(x))))
        return logits


def rule(module: nn.Module, dtype: torch.dtype) -> str:
    """Return the output type of a module on CUDA."""
    if isinstance(module, IN_16_BITS):
        return name_of(dtype)
    return "float32" if isinstance(module, IN_32_BITS) else "of its operations"


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a type without `torch.`."""
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Run one forward and backward and print the types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", nargs="?", metavar="FILE.py:NAME")
    parser.add_argument("--input", default="4,5", help="the shape of its input")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    file, _, name = (args.module or ":").rpartition(":")
    model: nn.Module = (runpy.run_path(file)[name] if file else ToyModel)().to(args.device)
    dtype, rows = getattr(torch, args.dtype), []
    for path, module in model.named_modules():
        if not any(module.children()):
            module.register_forward_hook(
                lambda module, _, output, path=path: rows.append((path, name_of(output.dtype), rule(module, dtype)))
            )
    x = torch.randn(*map(int, args.input.split(",")), device=args.device)
    with torch.autocast(args.device, dtype):
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=args.device))
    loss.backward()
    kinds = {
        "parameters": model.parameters(),
        "gradients": [each.grad for each in model.parameters() if each.grad is not None],
    }
    of = {kind: ", ".join(sorted({name_of(each.dtype) for each in tensors})) for kind, tensors in kinds.items()}
    print(f"{'':12}{args.device:10}on CUDA")
    for row in (
        ("parameters", of["parameters"], "float32"),
        *rows,
        ("logits", name_of(logits.dtype), "of the last layer"),
        ("loss", name_of(loss.dtype), "float32"),
        ("gradients", of["gradients"], "as the parameters"),
    ):
        print(f"{row[0]:12}{row[1]:10}{row[2]}")


if __name__ == "__main__":
    main()
