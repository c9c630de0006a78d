"""Muon: momentum whose matrices are made orthogonal before the step.

Source: Keller Jordan and others, "Muon: an optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Muon(torch.optim.Optimizer):
    """For the matrices inside a network; embeddings and vectors want another optimizer."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weight)
                velocity = state["momentum"].lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonalize(weight.grad.lerp(velocity, group["momentum"]))
                scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.add_(update, alpha=-group["lr"] * scale)


def orthogonalize(matrix: torch.Tensor, *, num_steps: int = 5) -> torch.Tensor:
    """Bring all singular values of a matrix near one, by Newton-Schulz steps in bfloat16."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = (x / (x.norm() + 1e-7)).bfloat16()
    for _ in range(num_steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)
