"""When queued requests will be complete (QLM 6, equations 1 to 5).

A request waits until what is ahead of it has drained, is prefilled, and decodes: C = W + P + D. The token
throughput of a full batch is constant to a good approximation (QLM 2.4), so W is the sum of the output tokens
ahead over that throughput, a normal variable because the O_q are; D is O_q times the time per output token
and the inefficiency factor of continuous batching. A group is complete when the last of its requests is.

QLM profiles prefill and decode times per model and GPU by running one batch. Here they follow from the
latency profile of the instance, so that a new pair of model and GPU needs no run of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from headway.types import Batch

_NORMAL = NormalDist()


class Tokens(NamedTuple):
    """The tokens of a kind of request (O_q is normal, equation 3).

    prompt: mean prompt tokens.
    mean, std: of the output tokens.
    """

    prompt: float
    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast one instance serves one kind of request while its batch is full.

    batch: requests that run at once.
    prefill: seconds P that a prompt takes.
    token: seconds between two tokens of an answer, iterations with prompts of others included (epsilon * d).
    tokens: of the requests.
    """

    batch: float
    prefill: float
    token: float
    tokens: Tokens

    @property
    def throughput(self) -> float:
        """Output tokens per second of the whole batch (theta in equation 2)."""
        return self.batch / self.token

    @property
    def share(self) -> float:
        """Seconds by which one request ahead delays the next (O_q / theta)."""
        return self.tokens.mean / self.throughput

    @property
    def share_std(self) -> float:
        """Standard deviation of `share`."""
        return self.tokens.std / self.throughput

    @property
    def decode(self) -> float:
        """Mean seconds D of a whole answer (equation 4)."""
        return self.tokens.mean * self.token

    @property
    def again(self) -> float:
        """Mean seconds that an evicted request's tokens take to be computed again."""
        tokens = self.tokens
        return self.prefill * (1.0 + tokens.mean / (2.0 * max(tokens.prompt, 1.0)))

    def remaining(self, elapsed: float) -> float:
        """Return the mean seconds that an answer still takes which has been decoded for `elapsed` seconds.

        The mean of a normal variable above a bound: long answers are those that are left after a while.
        """
        spread = max(self.tokens.std * self.token, 1e-6)
        above = (elapsed - self.decode) / spread
        tail = max(1.0 - _NORMAL.cdf(above), 1e-6)
        return max(self.decode - elapsed + spread * _NORMAL.pdf(above) / tail, self.token)

    def finish(self, probability: float, requests: float = 1.0) -> float:
        """Return the seconds within which requests that start one after another are complete.

        They count from the start of the last. The maximum over a group (equation 5) is that of the requests
        which can still be last: those that start within one standard deviation of the last one's decode time.
        """
        spread = self.tokens.std * self.token
        rivals = min(max(spread / self.share, 1.0), max(requests, 1.0)) if self.share > 0 else 1.0
        z = _NORMAL.inv_cdf(probability ** (1.0 / rivals))
        return self.prefill + max(self.decode + z * spread, self.token)


def pace_of(
    latency: Callable[[Batch], float], tokens: Tokens, max_running: int, kv_tokens: int, inefficiency: float = 1.0
) -> Pace:
    """Return the pace of an instance at which it serves a kind of request in a full batch.

    latency: forecast seconds of an iteration. kv_tokens: that its KV holds; a request holds its prompt and on
    average half its answer. inefficiency: epsilon of equation 4, of decoding over the forecast.
    """
    answer = max(tokens.mean, 1.0)
    held = tokens.prompt + answer / 2
    batch = min(max(kv_tokens / held, 1.0), float(max_running))
    context = int(batch * held)
    step = latency(Batch(math.ceil(batch), context, 0))
    prompt = Batch(math.ceil(batch), context, int(tokens.prompt), int(tokens.prompt**2 / 2))
    prefill = max(latency(prompt) - step, 0.0)
    # In a full batch each answer sees `batch` prompts of others come in while it is being made.
    token = (step + batch * prefill / answer) * inefficiency
    return Pace(batch, step + prefill, token, tokens)


class Inefficiency:
    """The inefficiency factor epsilon, learned from how long answers took inside an instance."""

    def __init__(self, weight: float = 0.02) -> None:
        self._weight, self._factors = weight, dict[tuple[str, str], float]()

    def factor(self, instance: str, model: str) -> float:
        """Return seconds taken over seconds forecast, 1 before any answer."""
        return self._factors.get((instance, model), 1.0)

    def learn(self, instance: str, model: str, taken: float, forecast: float) -> None:
        """Add one answer: seconds inside the instance, and those that a full batch was forecast to take.

        forecast: without the factor. Only answers of a full batch teach anything about it.
        """
        if taken > 0 and forecast > 0:
            ratio = min(max(taken / forecast, 0.1), 10.0)
            before = self.factor(instance, model)
            self._factors[instance, model] = before + self._weight * (ratio - before)
