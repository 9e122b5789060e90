"""Making metrics with an engine's labels, and reading several engines' as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve.api.figures.histogram import Histogram

LABELS = ("model_name", "engine")


class Maker:
    """Makes metrics with the prefix, bound to an engine's labels, in a registry of its own."""

    def __init__(
        self, prefix: str, registry: CollectorRegistry, model_name: str, engine: int
    ) -> None:
        self._prefix = prefix
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": str(engine)}

    def gauge(self, name: str, text: str, extra: dict[str, str] | None = None) -> Gauge:
        labels = {**self._labels, **(extra or {})}
        return Gauge(self._prefix + name, text, list(labels), registry=self._registry).labels(
            **labels
        )

    def counter(self, name: str, text: str) -> Counter:
        return Counter(self._prefix + name, text, LABELS, registry=self._registry).labels(
            **self._labels
        )

    def family(self, name: str, text: str, *labels: str) -> Callable[..., Counter]:
        """A counter for each combination of these labels' values, as they come."""
        family = Counter(self._prefix + name, text, [*LABELS, *labels], registry=self._registry)
        return partial(family.labels, **self._labels)

    def counters(self, name: str, text: str, label: str, values: Sequence[str]) -> list[Counter]:
        """One family with one more label; all its values exist from the start."""
        family = Counter(self._prefix + name, text, [*LABELS, label], registry=self._registry)
        return [family.labels(**self._labels, **{label: value}) for value in values]

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(self._prefix + name, text, buckets, self._labels)
        self._registry.register(histogram)
        return histogram


class Joined(Collector):
    """Registries as one: a family of several engines is one family, with the samples of each.

    Without the `_created` samples: time stamps that the text format shows as one more gauge per
    counter and histogram.
    """

    def __init__(self, registries: Iterable[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        """Each family once."""
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for metric in registry.collect():
                samples = [s for s in metric.samples if not s.name.endswith("_created")]
                family = families.setdefault(metric.name, metric)
                family.samples = samples if family is metric else family.samples + samples
        yield from families.values()
