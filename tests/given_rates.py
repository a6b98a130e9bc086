"""Rates of a machine that is said to be so: what a cache decides by them hangs on nothing that is measured here."""

from __future__ import annotations

from prefixcache.metrics.rates import EVIDENCE, LONG, LinearTime, MeasuredRates, ModelRates

LENGTHS = (LONG, 600, 1200, 2500, 5000)


class GivenRates(MeasuredRates):
    """Of every model, that fetches and prefills take so long. Nothing is learnt afterwards."""

    def __init__(self, fetch: LinearTime, prefill: LinearTime):
        super().__init__()
        self._given = ModelRates()
        for tokens in LENGTHS * EVIDENCE:
            self._given.fetches.add(tokens, fetch.at(tokens))
            self._given.prefills.add(tokens, prefill.at(tokens))

    def learn_fetch(self, *args: object) -> None:
        pass

    def learn_prefill(self, *args: object) -> None:
        pass

    def _of(self, model: str) -> ModelRates:
        return self._given


def computing_is(how: str) -> GivenRates:
    """Computing is "quicker" than a fetch, "slower" than one, or takes "forever"."""
    fetch, prefill = {"quicker": (1.0, 0.001), "slower": (0.001, 1.0), "forever": (0.001, 10.0)}[how]
    return GivenRates(LinearTime(0.0, fetch), LinearTime(0.0, prefill))
