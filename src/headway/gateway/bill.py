"""What a request costs its tenant, and the budgets in which that counts.

A budget is an account of the broker. In the write that stores a request, all that it may cost is counted there, and
in the write that stores its end what it has cost. So a budget holds for all gateways of a store and over their deaths.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Literal, NamedTuple

from msgspec import Raw, json
from pydantic import TypeAdapter

from headway.config import BATCH, Budget, Key, Price
from headway.errors import RequestError
from headway.store.queue.port import NO_CHARGES, Charge, Job, Unused
from headway.types import Request, Slo

Unit = Literal["tokens", "cost"]
BUDGET_SPENT = "budget_spent"  # code of the error of a request for which a budget has no room
_ROUNDING = 1 + 1e-9  # of sums of prices
_DECIMALS = 12  # of a cost: a price is for a million tokens, and has six at most


class Used(NamedTuple):
    """Tokens of a request: of its prompts, of its answers, and of its prompts those in the engine's prefix cache."""

    prompt: int
    answer: int
    cached: int = 0


class Reserved(NamedTuple):
    """What was counted in an account when a request was accepted."""

    account: str
    unit: Unit
    units: float


@dataclass(frozen=True, slots=True)
class Bill:
    """Who pays for a request, and how much.

    key: the name of the API key that it came with. price: None = its model has none.
    reserved: what was counted for it. beyond: the soft budget that has no room for it, None = all have.
    """

    key: str = ""
    price: Price | None = None
    reserved: tuple[Reserved, ...] = ()
    beyond: str | None = None

    def cost(self, used: Used) -> float | None:
        """Return the cost of tokens; None = the model has no price."""
        return None if self.price is None else round(self.price.units(*used), _DECIMALS)

    def unused(self, used: Used) -> dict[str, float]:
        """Return by account what was reserved and not used."""
        units = {"tokens": float(used.prompt + used.answer), "cost": self.cost(used) or 0.0}
        return {one.account: one.units - units[one.unit] for one in self.reserved}


@dataclass(frozen=True, slots=True)
class _StoredBill:
    """The part of a job's request that `with_bill` adds."""

    bill: Bill = Bill()


_BILL, _STORED = TypeAdapter(Bill), TypeAdapter(_StoredBill)


def with_bill(request: str, bill: Bill) -> str:
    """Return the JSON object of a job's request with its bill."""
    return request if bill == Bill() else f'{request[:-1]},"bill":{_BILL.dump_json(bill).decode()}}}'


def bill_of(job: Job) -> Bill:
    """Return the bill of a job; ValueError if it cannot be read."""
    return _STORED.validate_json(job.request).bill


def unused_by(job: Job) -> Unused:
    """Return the charges to release of a job that another gateway held and that is not run again.

    A background job releases all. A job with a connection releases nothing, because it is not known here what its
    client got, until its gateway reports that, if it is alive after all (the store was away for longer than its lease).
    """
    try:
        return bill_of(job).unused(Used(0, 0)) if job.background else NO_CHARGES
    except ValueError:  # it is logged where it would be run
        return NO_CHARGES


def priced(answer: bytes, cost: float) -> bytes:
    """Return an answer, or the data of an event, with a cost in its usage; its other fields stay byte for byte.

    An answer without usage is returned unchanged.
    """
    fields = json.decode(answer, type=dict[str, Raw])
    usage = json.decode(fields.get("usage", b"null"))
    return json.encode({**fields, "usage": {**usage, "cost": cost}}) if usage else answer


# ---- budgets


@dataclass(slots=True)
class OpenAccount:
    """One account of a tenant, and what a request may cost there.

    name: of the account. limits: budgets that count in it, the lowest first. begin, end: its day or month.
    """

    name: str
    unit: Unit
    units: float
    limits: list[Budget]
    begin: datetime
    end: datetime

    @property
    def what(self) -> str:
        """Return a name of the budget for people."""
        return f"{self.unit} per {self.limits[0].per}"

    @property
    def charge(self) -> Charge:
        """Return the charge that has room within the lowest limit."""
        most = limit_of(self.limits[0]) * _ROUNDING if self.limits else math.inf
        begin = self.begin.timestamp()
        return Charge(self.name, self.units, most, begin, begin - 1)

    def refusal(self, counted: float, now: datetime) -> RequestError:
        """Return the error of a request for which the lowest limit has no room (429)."""
        most, until = limit_of(self.limits[0]), f"{self.end:%Y-%m-%d %H:%M} UTC"
        wait, left = f"{math.ceil((self.end - now).total_seconds())}", max(most - counted, 0.0)
        hint = f"Send a smaller max_tokens, wait for your other requests to end, or until {until}."
        if self.units > most:
            hint = f"Send a smaller max_tokens: it is more than the whole budget, which begins anew at {until}."
        return RequestError(
            f"This tenant's budget of {_shown(most)} {self.what} has {_shown(left)} left, and this request may take "
            f"{_shown(self.units)} (keys.budgets).",
            hint,
            status=429,
            kind="insufficient_quota",
            code=BUDGET_SPENT,
            headers={
                "retry-after": wait,
                "x-should-retry": "false",  # OpenAI's clients would send it again within seconds
                "x-headway-dropped-reason": "budget",
                f"x-ratelimit-limit-{self.unit}": _shown(most).replace(",", ""),
                f"x-ratelimit-remaining-{self.unit}": _shown(left).replace(",", ""),
                f"x-ratelimit-reset-{self.unit}": f"{wait}s",
            },
        )


_DAY = timedelta(days=1)


def accounts_of(key: Key | None, request: Request, price: Price | None, now: datetime) -> list[OpenAccount]:
    """Return the accounts in which a request counts, each with the most that it may cost. now: in UTC.

    RequestError (403) for a budget by cost and a model without a price.
    """
    budgets = () if key is None else key.budgets
    if not budgets:
        return []
    if price is None and any(unit_of(one) == "cost" for one in budgets):
        name = request.adapter or request.model
        raise RequestError(
            f"The key has a budget by cost, but the model {name} has no price.",
            f"Ask the operator to add [prices.{name}], of 0 if it costs nothing.",
            status=403,
            kind="permission_error",
            code="no_price",
        )
    most = Used(request.prompt_tokens, request.max_tokens * request.places)
    units: dict[Unit, float] = {"tokens": float(sum(most[:2])), "cost": 0.0 if price is None else _dearest(price, most)}
    return open_accounts(request.tenant, budgets, units, now)


def open_accounts(
    tenant: str, budgets: Collection[Budget], units: Mapping[Unit, float], now: datetime
) -> list[OpenAccount]:
    """Return the accounts of a tenant's budgets. units: to be charged, by kind. now: in UTC."""
    kinds = dict.fromkeys((unit_of(one), one.per) for one in budgets)
    return [
        OpenAccount(
            f"budget of {tenant}: {unit} per {per}",
            unit,
            units[unit],
            sorted((one for one in budgets if (unit_of(one), one.per) == (unit, per)), key=limit_of),
            *window(per, now),
        )
        for unit, per in kinds
    ]


def window(per: Literal["day", "month"], now: datetime) -> tuple[datetime, datetime]:
    """Return the beginning and the end of the day or month of an instant in UTC."""
    day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if per == "day":
        return day, day + _DAY
    first = day.replace(day=1)
    return first, (first + timedelta(days=31)).replace(day=1)


def unit_of(budget: Budget) -> Unit:
    """Return what a budget counts."""
    return "tokens" if budget.tokens is not None else "cost"


def reserved_in(accounts: Sequence[OpenAccount]) -> tuple[Reserved, ...]:
    """Return what is counted in accounts for a request."""
    return tuple(Reserved(one.name, one.unit, one.units) for one in accounts)


def without_promises(request: Request) -> Request:
    """Return a request as it is served beyond a soft budget: like those of the built-in class batch."""
    return replace(request, slo=Slo(weight=request.slo.weight, soft=BATCH.slo.soft), drop=False)


def _shown(units: float) -> str:
    return f"{units:,.0f}" if units == int(units) else f"{units:,.6g}"


def limit_of(budget: Budget) -> float:
    """Return how much a budget allows."""
    return float(budget.tokens or budget.cost or 0.0)


def _dearest(price: Price, most: Used) -> float:
    """Return the most that a request may cost, with all or nothing of its prompt in the engine's cache."""
    return max(price.units(*most), price.units(most.prompt, most.answer, most.prompt))
