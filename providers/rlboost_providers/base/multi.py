"""Clouds together as one `Provider`: the cheapest offer of all, and one list of machines.

Guarantees: clouds are queried concurrently, and one that does not answer hides nothing of the others: its
machines are taken to be as they were last seen (never as gone); where it has never answered, `describe`
raises `PartlyListed` with what the others have. A machine is terminated at the cloud that has it, or at every
cloud where that is not known.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rlboost_providers.base.provider import (
    Ability,
    CanPreempt,
    CanShowConsole,
    LaunchRequest,
    MachineView,
    Offer,
    PartlyListed,
    Provider,
    absent,
)
from rlboost_runtime.errors import ConfigError, ProviderError, RLBoostError
from rlboost_runtime.logs import event

log = logging.getLogger(__name__)


class MultiProvider:
    """The providers of one run, by name. Any thread may call any method."""

    def __init__(self, providers: Mapping[str, Provider]) -> None:
        if not providers:
            raise ConfigError("no provider was given", "name an offer in rollout.spot.any_of")
        self._providers = dict(providers)
        self._seen: dict[str, dict[str, MachineView]] = {}
        self._described: set[str] = set()
        """Clouds that have listed their machines; a launch alone does not reveal the others."""
        self._lock = threading.Lock()

    def only(self, clouds: Collection[str]) -> MultiProvider | None:
        """Return the same without the clouds that are not in `clouds`; None if none is left."""
        kept = {name: provider for name, provider in self._providers.items() if name in clouds}
        if not kept:
            return None
        fewer = MultiProvider(kept)
        with self._lock:
            fewer._seen = {name: dict(views) for name, views in self._seen.items() if name in kept}
            fewer._described = self._described & set(kept)
        return fewer

    @property
    def abilities(self) -> frozenset[Ability]:
        """What all of them can do."""
        return frozenset.intersection(*(provider.abilities for provider in self._providers.values()))

    def offers(self) -> list[Offer]:
        """Return all offers, cheapest first. Raises a cloud's error only where no other offers anything."""
        answers, problems = ask_all(self._providers, lambda name: self._providers[name].offers())
        for name, problem in problems.items():
            event(log, "provider.offers_failed", provider=name, problem=problem.problem)
        found = [offer for offers in answers.values() for offer in offers]
        if problems and not found:
            raise next(iter(problems.values()))
        return sorted(found, key=lambda offer: offer.price_micro_usd_per_hour)

    def launch(self, request: LaunchRequest) -> MachineView:
        """Launch where the offer is from."""
        name = request.offer.provider
        if name not in self._providers:
            known = ", ".join(self._providers)
            raise ConfigError(f"no provider {name} in this run", f"there are {known}")
        view = self._providers[name].launch(request)
        with self._lock:
            self._seen.setdefault(name, {})[view.machine] = view
        return view

    def describe(self, run: str) -> list[MachineView]:
        """Return every cloud's machines of the run. Raises `PartlyListed` where one was never seen."""
        answers, problems = ask_all(self._providers, lambda name: self._providers[name].describe(run))
        for name, views in answers.items():
            self._remember(name, views)
        self._tolerate(problems)
        return self._last()

    def watch(self, run: str) -> list[MachineView] | None:
        """Ask the clouds that are due; None where none is, or where one has not been seen yet. Raises as
        `describe` where one that was never seen is due and does not answer."""
        answers, problems = ask_all(self._providers, lambda name: self._providers[name].watch(run))
        news = {name: views for name, views in answers.items() if views is not None}
        for name, views in news.items():
            self._remember(name, views)
        is_news = self._tolerate(problems) or bool(news)
        return self._last() if is_news and self._described.issuperset(self._providers) else None

    def terminate(self, run: str, machine: str) -> None:
        """Terminate the machine where it was seen, or else everywhere. Raises once all have been asked."""
        with self._lock:
            there = [name for name, views in self._seen.items() if machine in views]
        problems = []
        for name in there or self._providers:
            try:
                self._providers[name].terminate(run, machine)
            except RLBoostError as problem:
                problems.append(problem)
        if problems:
            raise problems[0]

    def preempt(self, run: str, machine: str, notice_s: float | None) -> None:
        """Reclaim it at the cloud that has it. Raises `NotFound`, `ProviderError`."""
        with self._lock:
            there = next((name for name, views in self._seen.items() if machine in views), None)
        if there is None:
            raise absent(run, machine)
        provider = self._providers[there]
        if not isinstance(provider, CanPreempt):
            raise ProviderError(f"{there} cannot preempt on purpose", "use the cloud's own console")
        provider.preempt(run, machine, notice_s)

    def console(self, run: str, machine: str) -> str:
        """Return what the cloud that has it keeps of its console; empty where none does."""
        with self._lock:
            there = [name for name, views in self._seen.items() if machine in views]
        showing = (self._providers[name] for name in there)
        found = (each.console(run, machine) for each in showing if isinstance(each, CanShowConsole))
        return next(found, "")

    def _tolerate(self, problems: Mapping[str, RLBoostError]) -> bool:
        """Go on without clouds that have answered before; return True if they answered in part. Raises
        `PartlyListed` for those that never answered, or the first one's error where nothing is known."""
        is_news = False
        for name, problem in problems.items():
            event(log, "provider.describe_failed", provider=name, problem=problem.problem)
            if isinstance(problem, PartlyListed):
                is_news = True
                with self._lock:
                    self._seen.setdefault(name, {}).update({view.machine: view for view in problem.views})
        silent = {name: problem for name, problem in problems.items() if name not in self._described}
        if silent and len(silent) == len(self._providers) and not self._last():
            raise next(iter(silent.values()))
        if silent:
            raise PartlyListed(self._last(), silent)
        return is_news

    def _remember(self, name: str, views: list[MachineView]) -> None:
        with self._lock:
            self._seen[name] = {view.machine: view for view in views}
            self._described.add(name)

    def _last(self) -> list[MachineView]:
        with self._lock:
            return [view for views in self._seen.values() for view in views.values()]


def narrowed(provider: Provider, clouds: Collection[str]) -> Provider | None:
    """Return `provider` without the clouds in which nothing was launched, those not in `clouds`; None if
    nothing is left to ask."""
    if isinstance(provider, MultiProvider):
        return provider.only(clouds)
    return provider if clouds else None


Place = TypeVar("Place")
Answer = TypeVar("Answer")

_AT_ONCE = 16


def ask_all(
    places: Collection[Place], ask: Callable[[Place], Answer]
) -> tuple[dict[Place, Answer], dict[Place, RLBoostError]]:
    """Return the answers, and the errors of the others, in the places' order.

    Blocks until the slowest has answered.
    """
    answers: dict[Place, Answer] = {}
    problems: dict[Place, RLBoostError] = {}
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(places)))) as pool:
        calls = {place: pool.submit(ask, place) for place in places}
    for place, call in calls.items():
        try:
            answers[place] = call.result()
        except RLBoostError as problem:
            problems[place] = problem
    return answers, problems
