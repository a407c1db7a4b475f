"""The demand graphs of all applications, learned from the runs that end."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from headway.policy.apps.demand import Demand
from headway.policy.apps.graph import KEPT, Graph, Visit

SHARED = ""  # the tenant of graphs that were imported: they serve every tenant without runs of its own
_KEPT = 1024  # graphs
_GROWN = 20  # a compiled graph is used until this share (1/20) of the runs that it knows is new


class Knowledge:
    """Graphs by tenant and application: what one tenant's runs teach is not used for another's.

    learns: runs that end teach their graph.
    """

    def __init__(self, *, learns: bool = True) -> None:
        self.learns = learns
        self._graphs: OrderedDict[tuple[str, str], Graph] = OrderedDict()
        self._compiled: dict[tuple[str, str], Demand] = {}

    @property
    def graphs(self) -> dict[tuple[str, str], Graph]:
        """The graphs by (tenant, application)."""
        return dict(self._graphs)

    def put(self, tenant: str, graph: Graph) -> None:
        """Add or replace a graph."""
        self._graphs[tenant, graph.app] = graph
        self._compiled.pop((tenant, graph.app), None)
        self._forget()

    def learn(self, tenant: str, app: str, visits: Sequence[Visit]) -> None:
        """Learn from a complete run; the first one of a tenant starts from the shared graph, if any."""
        if not self.learns:
            return
        graph = self._graphs.get((tenant, app))
        if graph is None:
            shared = self._graphs.get((SHARED, app))
            graph = Graph(app) if shared is None else shared.copy()
            self._graphs[tenant, app] = graph
        graph.learn(visits)
        self._graphs.move_to_end((tenant, app))
        self._forget()

    def demand(self, tenant: str, app: str) -> Demand | None:
        """Return the compiled graph of an application, None = nothing is known of it."""
        key = (tenant, app) if (tenant, app) in self._graphs else (SHARED, app)
        graph = self._graphs.get(key)
        if graph is None or not graph.units:
            return None
        self._graphs.move_to_end(key)
        compiled = self._compiled.get(key)
        if compiled is None or graph.runs > compiled.runs + min(compiled.runs, KEPT) // _GROWN:
            compiled = self._compiled[key] = Demand(graph)
        return compiled

    def _forget(self) -> None:
        """Forget the least used graph of the tenant that has most: no tenant pushes out another's."""
        while len(self._graphs) > _KEPT:
            ((most, _),) = Counter(tenant for tenant, _ in self._graphs).most_common(1)
            key = next(key for key in self._graphs if key[0] == most)
            del self._graphs[key]
            self._compiled.pop(key, None)
