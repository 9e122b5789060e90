"""Trace lines → the JSON that chrome://tracing and Perfetto draw: one track per request.

Format: Google's "Trace Event Format", complete ("X"), counter ("C") and metadata ("M") events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]

_STEPS, _REQUESTS = 1, 2
"""The two groups of tracks ("processes" in the format)."""


def chrome_trace(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All of a trace. Requests that never ran have no track."""
    lines = list(lines)
    steps = [line for line in lines if line["type"] == "step"]
    requests = {line["id"]: line for line in lines if line["type"] == "request"}
    origin = min([s["began"] for s in steps] + [r["arrival"] for r in requests.values()], default=0)
    drawing = _Drawing(origin)
    drawing.name_group(_STEPS, "engine")
    drawing.name_group(_REQUESTS, "requests")
    for step in steps:
        drawing.step(step)
    for step in steps:
        drawing.follow(step)
    drawing.close(requests, steps)
    return {"traceEvents": drawing.events, "displayTimeUnit": "ms"}


class _Drawing:
    """Collects events; remembers what each request is doing and since when."""

    def __init__(self, origin: float) -> None:
        self.events: list[Event] = []
        self._origin = origin
        self._track_of: dict[str, int] = {}
        self._doing: dict[str, tuple[str, float]] = {}

    def name_group(self, group: int, name: str) -> None:
        self.events.append(_named("process_name", group, 0, name))

    def step(self, step: dict[str, Any]) -> None:
        """The step itself, its phases, and the counts after it."""
        phases = [("schedule", step["schedule_s"]), ("execute", step["execute_s"])]
        phases.append(("update", step["update_s"]))
        figures = {k: v for k, v in step.items() if k.startswith("num_")}
        start = step["began"]
        total = sum(seconds for _, seconds in phases)
        self._span(_STEPS, 0, f"step {step['number']}", start, total, figures)
        for name, seconds in phases:
            self._span(_STEPS, 1, name, start, seconds)
            start += seconds
        for name, keys in _COUNTERS.items():
            self.events.append(
                {
                    "ph": "C",
                    "pid": _STEPS,
                    "name": name,
                    "ts": self._us(step["began"]),
                    "args": {key.removeprefix("num_"): step[key] for key in keys},
                }
            )

    def follow(self, step: dict[str, Any]) -> None:
        """What the step meant for each request that changed in it."""
        began = step["began"] + step["schedule_s"]
        ended = began + step["execute_s"]
        for request_id, how in step["preempted"]:
            self._becomes(request_id, "swapped" if how == "swap_out" else "preempted", began)
        for request_id, _ in step["admitted"]:
            self._becomes(request_id, "decode", began)
        for request_id, start, num_tokens, recomputed in step["chunks"]:
            self._becomes(request_id, "decode", began)
            name = "recompute" if recomputed else "prefill"
            figures = {"start": start, "num_tokens": num_tokens, "num_recomputed": recomputed}
            self._span(_REQUESTS, self._track(request_id), name, began, ended - began, figures)
            self._doing[request_id] = ("decode", ended)

    def close(self, requests: dict[str, Any], steps: list[dict[str, Any]]) -> None:
        """Queued times, and the ends of what was going on."""
        last = steps[-1] if steps else None
        end = last["began"] + last["schedule_s"] + last["execute_s"] if last else 0.0
        for request_id, request in requests.items():
            if request["first_scheduled"] is not None:
                waited = request["first_scheduled"] - request["arrival"]
                self._span(_REQUESTS, self._track(request_id), "queued", request["arrival"], waited)
        for request_id in list(self._doing):
            request = requests.get(request_id)
            self._becomes(request_id, "", request["finished"] if request else end)

    def _becomes(self, request_id: str, state: str, at: float) -> None:
        """Draw what the request did until now; from now on it does something else."""
        if request_id in self._doing:
            before, since = self._doing[request_id]
            if at > since:
                self._span(_REQUESTS, self._track(request_id), before, since, at - since)
        self._doing[request_id] = (state, at)

    def _track(self, request_id: str) -> int:
        if request_id not in self._track_of:
            self._track_of[request_id] = len(self._track_of) + 1
            track = self._track_of[request_id]
            self.events.append(_named("thread_name", _REQUESTS, track, request_id))
        return self._track_of[request_id]

    def _span(
        self,
        group: int,
        track: int,
        name: str,
        start: float,
        seconds: float,
        figures: dict[str, Any] | None = None,
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "pid": group,
                "tid": track,
                "name": name,
                "ts": self._us(start),
                "dur": round(seconds * 1e6, 3),
                "args": figures or {},
            }
        )

    def _us(self, time: float) -> float:
        return round((time - self._origin) * 1e6, 3)


_COUNTERS = {
    "queues": ("num_running", "num_waiting", "num_swapped"),
    "blocks": ("num_blocks_used", "num_host_blocks_used"),
}


def _named(kind: str, group: int, track: int, name: str) -> Event:
    return {"ph": "M", "pid": group, "tid": track, "name": kind, "args": {"name": name}}
