"""Time of several ways to do one thing on a GPU, taken in turn so that clock and temperature are the same for all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

Run = Callable[[], object]
Timer = Callable[[Mapping[str, Run]], dict[str, float]]

REPLAYS = 25
# More than the L2 cache of any GPU today, so that every replay begins with a cold one.
_FLUSHED_BYTES = 256 * 2**20


def captured(run: Run) -> torch.cuda.CUDAGraph:
    """`run` as a CUDA graph, after two runs that compile and warm up; the host's time is then no part of it."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def interleaved(runs: Mapping[str, Run], replays: int = REPLAYS) -> dict[str, float]:
    """Median milliseconds of each on the current device, all replayed in turn, each with a cold L2."""
    graphs = {name: captured(run) for name, run in runs.items()}
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, graph in graphs.items():
            flushed.zero_()
            start, end = _event(), _event()
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
