"""How long computing the KV of a prompt takes, learnt from measured steps."""

from __future__ import annotations

_MIN_TOKENS = 16
"""Steps of fewer tokens are decodes: what they cost says little about prefill."""

_FORGET = 0.97
_GUESS_NS_A_TOKEN = 1e6


class PrefillRate:
    """Nanoseconds = a · tokens + b · tokens · mean context, by least squares with forgetting.

    The first term is the linear layers, the second attention. Until two different steps have been seen, b is
    0; until one has been, a is a guess of 1 ms.
    """

    def __init__(self) -> None:
        self._xx = self._xy = self._yy = self._xt = self._yt = 0.0
        self._a, self._b = _GUESS_NS_A_TOKEN, 0.0

    def measure(self, num_tokens: int, sum_context: float, duration_ns: int) -> None:
        """Record a step: its tokens, and the sum of how many tokens each of them attended to."""
        if num_tokens < _MIN_TOKENS or duration_ns < 1:
            return
        x, y, t = float(num_tokens), float(sum_context), float(duration_ns)
        weight = 1 / x  # long steps weigh no more than short ones
        self._xx = _FORGET * self._xx + weight * x * x
        self._xy = _FORGET * self._xy + weight * x * y
        self._yy = _FORGET * self._yy + weight * y * y
        self._xt = _FORGET * self._xt + weight * x * t
        self._yt = _FORGET * self._yt + weight * y * t
        self._fit()

    @property
    def ns_a_token(self) -> float:
        """The first coefficient, of the linear layers."""
        return self._a

    @property
    def ns_a_token_context(self) -> float:
        """The second coefficient, of attention: per token and token of context."""
        return self._b

    def cost_ns(self, start: int, num_tokens: int) -> int:
        """Estimate the time to compute `num_tokens` tokens after `start` others."""
        sum_context = num_tokens * (start + num_tokens / 2)
        return round(self._a * num_tokens + self._b * sum_context)

    def _fit(self) -> None:
        determinant = self._xx * self._yy - self._xy * self._xy
        self._a, self._b = self._xt / self._xx, 0.0
        if determinant > 1e-6 * self._xx * self._yy:
            a = (self._xt * self._yy - self._yt * self._xy) / determinant
            b = (self._yt * self._xx - self._xt * self._xy) / determinant
            if a >= 0 and b >= 0:
                self._a, self._b = a, b
