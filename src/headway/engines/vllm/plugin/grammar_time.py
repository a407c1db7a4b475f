"""Ends requests whose grammars take the engine too long.

The mask of the tokens that a grammar allows is computed between iterations, while all other requests wait. A
short grammar may be so ambiguous that each mask takes seconds, as "(([a-z ]*)*)*x" does in xgrammar, and its
size does not show it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("headway.engine")
SLOW_S = 0.05  # seconds of an iteration's masks above which they are counted
MOST_S = 1.0  # seconds that the slow masks of one request may take in all


class GrammarTimeMixin:
    """Placed before a stock scheduler class. timer: seconds. cpu_timer: those of this thread on a core."""

    requests: dict[str, Any]
    structured_output_manager: Any
    # These end as failed after this iteration; in vLLM 0.33 with the reason that the client gets.
    grammar_compile_error_reqs: set[str] | dict[str, Any]
    timer: Callable[[], float]
    cpu_timer: Callable[[], float] = staticmethod(time.thread_time)  # what other processes take does not count

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._grammar_s: dict[str, float] = {}

    def get_grammar_bitmask(self, scheduler_output: Any) -> Any:
        began, began_cpu = self.timer(), self.cpu_timer()
        output = super().get_grammar_bitmask(scheduler_output)  # type: ignore[misc]
        if output is not None and self.timer() - began > SLOW_S:
            self._charge(output.structured_output_request_ids, self.cpu_timer() - began_cpu)
        return output

    def _charge(self, ids: list[str], took: float) -> None:
        """Count the time of slow masks; of several requests each mask is computed once more, alone."""
        self._grammar_s = {id: seconds for id, seconds in self._grammar_s.items() if id in self.requests}
        for id in ids:
            seconds = took if len(ids) == 1 else self._seconds_alone(id)
            if seconds <= SLOW_S:
                continue
            self._grammar_s[id] = total = self._grammar_s.get(id, 0.0) + seconds
            if total > MOST_S:
                log.warning("request %s is ended: its grammar has taken %.1f s of the engine's time", id, total)
                self._fail(id, f"Its grammar has taken {total:.1f} s of the engine's time.")

    def _fail(self, id: str, why: str) -> None:
        failed = self.grammar_compile_error_reqs
        if isinstance(failed, set):
            failed.add(id)
            return
        from vllm.outputs import RequestError

        failed[id] = RequestError(code="validation_error", message=why)

    def _seconds_alone(self, id: str) -> float:
        grammar = self.requests[id].structured_output_request.grammar
        if grammar.is_terminated():
            return 0.0
        mask, began = self.structured_output_manager.backend.allocate_token_bitmask(1), self.cpu_timer()
        grammar.fill_bitmask(mask, 0)
        return self.cpu_timer() - began
