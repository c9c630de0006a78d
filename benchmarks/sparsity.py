"""What N:M sparsity is worth on this machine: `python benchmarks/sparsity.py`.

The four linears of a layer of a 0.6B model, with random weights in bfloat16: dense and pruned, both as an
engine keeps them on this device, and compressed (`SparseOutput`, expanded for each product). They take turns.
A CPU multiplies zeros like other numbers, so pruned should take as long as dense there, and compressed
longer; a GPU with sparse units multiplies 2:4 faster. Also printed: bytes, and the time of pruning.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import foreign_cores, output_flags, publish, spread

from sagellm.accel import MagnitudeSparsifier, SparsityConfig
from sagellm.accel.linear import LinearContext, WideRows, linear_methods

SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072))  # query·key·value, output, gate·up, down
DTYPE = torch.bfloat16
Product = Callable[[torch.Tensor], torch.Tensor]


class Way:
    """One way to keep the weights of a layer: its products, their bytes, and how long they took."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.num_bytes = 0
        self.times_us: list[float] = []

    def add(self, product: Product, num_bytes: int) -> None:
        """Add a linear."""
        self.products.append(product)
        self.num_bytes += num_bytes

    def time(self, inputs: list[torch.Tensor]) -> None:
        """Multiply by each linear once and note the time of all."""
        started_ns = _now_ns(inputs[0].device)
        for product, x in zip(self.products, inputs, strict=True):
            product(x)
        self.times_us.append((_now_ns(inputs[0].device) - started_ns) / 1e3)


def _now_ns(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns()


def make_layer(device: torch.device, sparsifier: MagnitudeSparsifier) -> tuple[dict[str, Way], float]:
    """Return the layer in each way, and the seconds that pruning it took."""
    ways = {"dense": Way(), "pruned": Way(), "compressed": Way()}
    context, prune_s = LinearContext(WideRows(DTYPE, device)), 0.0

    def product_of(weight: torch.Tensor, given: MagnitudeSparsifier | None) -> Product:
        method: Any = linear_methods(DTYPE, device, None, given)()
        method.adopt(weight)
        return lambda x: method.apply(x, context)

    for shape in SHAPES:
        weight = torch.randn(shape, dtype=DTYPE, device=device) / shape[1] ** 0.5
        started_ns = _now_ns(device)
        pruned = sparsifier.prune(weight)
        prune_s += (_now_ns(device) - started_ns) / 1e9
        output = sparsifier.sparsify(weight)
        has_kernel = sparsifier.kernel(pruned) is not None
        ways["dense"].add(product_of(weight, None), weight.nbytes)
        ways["pruned"].add(product_of(pruned, sparsifier), output.num_bytes if has_kernel else pruned.nbytes)
        ways["compressed"].add(partial(sparsifier.linear, output=output), output.num_bytes)
    return ways, prune_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pattern", default="2:4")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 512], help="tokens at once")
    parser.add_argument("--repeats", type=int, default=30, help="of each way, in turn")
    output_flags(parser, "sparsity")
    options = parser.parse_args()
    device, others = torch.device(options.device), foreign_cores()
    sparsifier = MagnitudeSparsifier(SparsityConfig(pattern=options.pattern))
    found: dict[str, Any] = {}
    text = [f"{'rows':>5} {'way':12}{'MiB':>7}{'min':>10}{'median':>10}{'p99, µs a layer':>18}{'÷ dense':>9}"]
    with torch.inference_mode():
        ways, prune_s = make_layer(device, sparsifier)
        for num_rows in options.rows:
            inputs = [torch.randn(num_rows, shape[1], dtype=DTYPE, device=device) for shape in SHAPES]
            for way in ways.values():
                way.time(inputs)
                way.times_us = []
            for _ in range(options.repeats):
                for way in ways.values():
                    way.time(inputs)
            spreads = {name: spread(way.times_us, 1) for name, way in ways.items()}
            found[f"rows_{num_rows}_us"] = spreads
            for name, way in ways.items():
                us, ratio = spreads[name], spreads[name]["median"] / spreads["dense"]["median"]
                text.append(
                    f"{num_rows:>5} {name:12}{way.num_bytes / 2**20:>7.1f}{us['min']:>10}{us['median']:>10}"
                    f"{us['p99']:>18}{ratio:>9.2f}"
                )
    num_weights = sum(rows * columns for rows, columns in SHAPES)
    prune_ns = round(prune_s * 1e9 / num_weights, 1)
    text.append(f"\npattern {options.pattern} on {device}; pruning takes {prune_ns} ns a weight")
    text.append(f"other processes kept {others} cores busy")
    publish(
        "sparsity",
        "\n".join(text),
        options,
        pattern=options.pattern,
        device=str(device),
        busy_cores=others,
        prune_ns_per_weight=prune_ns,
        bytes_of_a_layer={name: way.num_bytes for name, way in ways.items()},
        **found,
    )


if __name__ == "__main__":
    main()
