"""The scalers of all models that have one, fed with the controller's events."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headway.config.tables import Scale
from headway.events import Arrived, Event, Finished, Learned
from headway.policy.core.cluster import Cluster
from headway.policy.scale.outlook import EngineSize
from headway.policy.scale.rates import DAY_S, Rates
from headway.policy.scale.scaler import Needs, Queue, Scaler
from headway.types import Floats, Instance, Request

_BUDGET = 2048  # tokens per iteration: engines do not tell, and chunks are as small as answers' pace wants them


class Scaling:
    """How many engines each model needs.

    scalers: by model. current: the newest number wanted of each. day_s: as in `Rates`.
    """

    def __init__(self, limits: Mapping[str, Scale], day_s: float = DAY_S) -> None:
        self.scalers = {model: Scaler(one, Rates(day_s)) for model, one in limits.items()}
        self.current: dict[str, int] = {}
        self._engines: dict[str, Instance] = {}  # the newest of each model
        self._thetas: dict[str, Floats] = {}

    def note(self, event: Event, cluster: Cluster, requests: Mapping[str, Request], now: float) -> None:
        """Take note of an event, before the controller forgets a request that has ended."""
        match event:
            case Arrived(request) if request.model in self.scalers:
                self.scalers[request.model].came(now)
            case Finished(id, output_tokens) if id in requests and requests[id].model in self.scalers:
                request = requests[id]
                self.scalers[request.model].ended(request, cluster.placement.computed(id, request), output_tokens)
            case Learned(name, theta) if name in cluster.instances:
                instance = cluster.instances[name]
                self._engines[instance.model], self._thetas[instance.model] = instance, theta

    def wanted(self, model: str, cluster: Cluster, now: float, have: int) -> int:
        """Return how many engines of a model should be up or starting.

        have: those that are; 0 = all were lost, or none is reported, so that the number wanted last counts.
        """
        return self.conclude(model, self.ask(model, cluster, now, have)(), have, now)

    def ask(self, model: str, cluster: Cluster, now: float, have: int) -> Callable[[], Needs]:
        """Return the computation that takes long, for another thread; `conclude` takes its result."""
        backlog = cluster.backlog
        rows = backlog.rows()
        rows = rows[backlog.model[rows] == cluster.code(model)]
        waiting = rows[~backlog.sent[rows]]
        queue = Queue(backlog.tokens[waiting], backlog.due[waiting], rows.size - waiting.size)
        return self.scalers[model].ask(now, have or self.current.get(model, 0), self._size(model), queue)

    def conclude(self, model: str, needs: Needs, have: int, now: float) -> int:
        """Return how many engines follow from what `ask` computed, and keep it in `current`."""
        have = have or self.current.get(model, 0)
        self.current[model] = self.scalers[model].conclude(needs, have, now)
        return self.current[model]

    def _size(self, model: str) -> EngineSize | None:
        if model not in self._thetas:
            return None
        instance = self._engines[model]
        kv = instance.blocks_total * instance.block_size
        return EngineSize(self._thetas[model], max(_BUDGET, instance.max_running), instance.max_running, kv)
