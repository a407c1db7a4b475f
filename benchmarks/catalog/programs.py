"""Agents as programs that are paused while KV is short: ThunderAgent, from its public description.

A program (a run of an agent) reasons, while a request of it is in an engine, or acts, while its tools work. Every 5 s
programs are resumed where there is room, the largest first, those with a waiting request before new ones and before
those that act; then, on each engine whose programs have more tokens than its KV holds, programs are paused until they
fit: the smallest that act, then the smallest that reason, which stop after their answer. A request of a paused
program waits. (Kang et al., arXiv 2602.13692; ThunderAgent's wiki on its scheduler, with its default settings.)

Requests outside runs are sent at once, to the engine of their conversation or, of a new one, to that with the fewest
requests; their tokens count while they are inside.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headway.events import Arrived, Event, Failed, Finished, Returned, RunEnded
from headway.policy.core.cluster import Cluster
from headway.policy.pack.ranked import Fcfs
from headway.policy.recipes.recipe import Recipe
from headway.ports import Planner
from headway.types import Plan, Request, Send

_INTERVAL, _LONGEST = 5.0, 1800.0  # seconds between checks, and that a program is paused at most
_BUFFER = 100  # tokens that each program may grow by


@dataclass(slots=True)
class _Program:
    """tokens: of its newest prompt and answer. engine: "" = paused, since `paused`. held: requests that wait here."""

    paused: float
    tokens: int = 0
    steps: int = 0
    engine: str = ""
    marked: bool = False
    inside: int = 0
    held: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.tokens + _BUFFER

    @property
    def acts(self) -> bool:
        return not self.inside and not self.held

    @property
    def group(self) -> int:
        """Its place among those that are resumed."""
        return 2 if self.acts else int(self.steps == 1)


class Programs(Planner):
    """Sends the requests of programs that are not paused."""

    def __init__(self) -> None:
        self._programs: dict[str, _Program] = {}
        self._of: dict[str, _Program] = {}  # by request
        self._new, self._talks = list[Request](), dict[str, str]()
        self._inside: dict[str, tuple[str, int]] = {}  # requests outside runs: their engines and tokens
        self._check = 0.0

    @property
    def pull(self) -> bool:
        """Requests wait inside the engines."""
        return False

    @property
    def wake_at(self) -> float:
        """The instant of the next check."""
        return self._check if self._programs else float("inf")

    def on(self, event: Event, cluster: Cluster, now: float) -> None:
        """Note what has come and ended."""
        match event:
            case Arrived(request) if request.stage is not None:
                program = self._programs.setdefault(request.stage.run, _Program(now))
                program.tokens, program.steps = max(program.tokens, request.prompt_tokens), program.steps + 1
                program.held.append(request.id)
                self._of[request.id] = program
            case Arrived(request):
                self._new.append(request)
            case Finished(id, output_tokens):
                self._ended(id, output_tokens, now)
            case RunEnded(run=run):
                self._programs.pop(run, None)
            case Returned(id) | Failed(id):
                raise NotImplementedError(f"{id} came back: engines do not fail here")

    def plan(self, cluster: Cluster, now: float) -> Plan:
        """Return the requests of programs that are not paused, and those outside runs."""
        sends = [Send(request.id, self._place(cluster, request)) for request in self._new]
        self._new.clear()
        self._resume(cluster, [one for one in self._programs.values() if one.steps == 1 and one.held], now)
        if now >= self._check:
            self._check = now + _INTERVAL
            self._resume(cluster, self._programs.values(), now)
            for name in cluster.instances:
                self._pause(cluster, name, now)
        for program in self._programs.values():
            if program.engine and not program.marked:
                sends += [Send(id, program.engine) for id in program.held]
                program.inside += len(program.held)
                program.held.clear()
        return Plan(sends, final=True)

    def _ended(self, id: str, output_tokens: int, now: float) -> None:
        self._inside.pop(id, None)
        program = self._of.pop(id, None)
        if program is None:
            return
        program.tokens, program.inside = program.tokens + output_tokens, program.inside - 1
        if program.marked:
            program.engine, program.marked, program.paused = "", False, now

    def _place(self, cluster: Cluster, request: Request) -> str:
        talk = request.id if request.prefix is None else request.prefix.id
        counts = {name: cluster.inside(name).rows.size for name in cluster.instances}
        name = self._talks.setdefault(talk, min(counts, key=counts.__getitem__))
        self._inside[request.id] = name, request.prompt_tokens
        return name

    def _room(self, cluster: Cluster, name: str) -> int:
        """Return the tokens that still fit into an engine's KV, below 0 = it has too many."""
        instance = cluster.instances[name]
        used = sum(one.size for one in self._programs.values() if one.engine == name and not one.marked)
        used += sum(tokens for engine, tokens in self._inside.values() if engine == name)
        return instance.blocks_total * instance.block_size - used

    def _resume(self, cluster: Cluster, programs: Iterable[_Program], now: float) -> None:
        """Resume what fits: chosen by group, then the largest first, each where most room is."""
        room = {name: self._room(cluster, name) for name in cluster.instances}
        left, chosen = sum(max(one, 0) for one in room.values()), list[_Program]()
        for program in sorted((one for one in programs if not one.engine), key=lambda one: one.group):
            if program.size <= left:
                left -= program.size
                chosen.append(program)
            elif now - program.paused > _LONGEST:
                program.engine = max(room, key=room.__getitem__)
        for program in sorted(chosen, key=lambda one: -one.size):
            name = max(room, key=room.__getitem__)
            if program.size <= room[name]:
                program.engine = name
                room[name] -= program.size

    def _pause(self, cluster: Cluster, name: str, now: float) -> None:
        """Pause the smallest programs of an engine until the others fit: first those that act."""
        mine = [one for one in self._programs.values() if one.engine == name and not one.marked]
        over = -self._room(cluster, name)
        for program in sorted(mine, key=lambda one: (not one.acts, one.size)):
            if over <= 0:
                return
            over -= program.size
            if program.inside:
                program.marked = True
            else:
                program.engine, program.paused = "", now


RECIPE = Recipe(
    "thunderagent", "programs paused while KV is short, in front of stock vLLM", Programs, lambda s: Fcfs(s.max_running)
)
