"""When to warm a backend that a run may need next (Hermes 3.4)."""

from __future__ import annotations

import math

import numpy as np

from headway.types import Floats


def trigger(share: float, ends: Floats, warm_s: float, k: float) -> float | None:
    """Return after how many seconds from now warming must begin to be effective with probability `k`.

    share: probability p_s that the next unit uses the backend.
    ends: equally likely seconds from now until the current unit ends.
    warm_s: seconds t_p that warming takes.
    k: the expected prewarming effectiveness K, 0 < K <= 1.

    Equation 3: p_e = p_s P(t_c > t_s + t_p), solved for p_e = K. None = never, as p_s < K. An instant that
    has passed already is 0: it is too late for that effectiveness, and warming at once is the most there is.
    """
    if share < k or not ends.size:
        return None
    ordered = np.sort(ends)
    # The latest start that leaves at least K / p_s of the ends after it.
    late = min(math.floor((1 - k / share) * ordered.size + 1e-9), ordered.size - 1)
    return max(float(ordered[late]) - warm_s, 0.0)
