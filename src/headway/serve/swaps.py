"""Model swaps as the gateway sees them: what leaves an engine, what its clients are told, and who gives up.

The engine's own supervisor loads the model (`VllmEngine.begin_swap`); its events say how that ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headway.core.controller import Controller
from headway.engines.vllm.process.client import VllmEngine
from headway.engines.vllm.process.models import ModelUnavailable
from headway.serve.requests import InFlightRequest
from headway.types import Swap, Warm


class ModelSwaps:
    """Carries out `Swap` and `Warm`, and ends the requests whose model cannot be loaded."""

    def __init__(
        self, controller: Controller, engines: Mapping[str, VllmEngine],
        in_flight: Mapping[str, InFlightRequest],
    ) -> None:  # fmt: skip
        self._controller, self._engines, self._in_flight = controller, engines, in_flight

    def swap(self, swap: Swap) -> None:
        """Order a swap, and take back what the engine has not begun to answer; it is queued again at once.

        An answer that is not streamed has not begun before it is complete. Streams go on to their end.
        """
        engine = self._engines[swap.instance]
        engine.begin_swap(swap.model)
        for request in self._in_flight.values():
            if request.inside(engine):
                request.take_back()

    def warm(self, warm: Warm) -> None:
        """Bring a model's weights into the host memory of an engine's machine."""
        self._engines[warm.instance].begin_warm(warm.model)

    # ---- models that are given up

    def unavailable(self, model: str) -> ModelUnavailable | None:
        """Return the error of a model that every engine which has it has given up, None = there is hope."""
        having = [engine for engine in self._engines.values() if model in engine.models.names]
        errors = [engine.models.unavailable(model) for engine in having]
        if not having or None in errors:
            return None
        names = ", ".join(engine.id for engine in having)
        return ModelUnavailable(
            f"The model {model} could not be loaded by {names}: {errors[-1]}",
            "Repair its directory and restart Headway; until then use another model.",
            code="model_unavailable",
        )

    def refuse_unavailable(self) -> None:
        """End the queued requests of models that are given up."""
        for request in self._waiting():
            error = self.unavailable(request.request.model)
            if error is not None:
                request.refuse(error)

    def _waiting(self) -> Iterable[InFlightRequest]:
        return [request for request in self._in_flight.values() if not request.engine_future.done()]

    # ---- what clients and operators are told

    def queued(self, model: str) -> int:
        """Return the number of requests for a model that are not inside an engine."""
        cluster = self._controller.cluster
        backlog, rows = cluster.backlog, cluster.backlog.rows()
        return int(((backlog.model[rows] == cluster.code(model)) & ~backlog.sent[rows]).sum())

    def obstacle(self, model: str) -> str | None:
        """Say why a request for a model cannot be in an engine now; None when there is an instance for it."""
        cluster = self._controller.cluster
        if any(instance.model == model for instance in cluster.instances.values()):
            return None
        loading = [name for name, (_, wanted) in cluster.loading.items() if wanted == model]
        if loading:
            return f"{model} is being loaded by {', '.join(loading)}"
        fleet = cluster.instances | {name: before for name, (before, _) in cluster.loading.items()}
        if not fleet:
            return "no instance is up"
        able = [name for name, one in fleet.items() if model == one.model or one.can_load(model)]
        if able:
            return f"{model} is not loaded; {', '.join(able)} can load it"
        return f"{model} is not loaded, and no instance can load it now"

    def state(self, id: str) -> str | None:
        """Say why a request is not in an engine; None when it is in one, or waits for its turn alone."""
        request = self._in_flight.get(id)
        if request is None or request.engine_future.done():
            return None
        return self.obstacle(request.request.model)
