"""Two ways to time a system on a GPU: bursts, taken in turn, and back to back until power limits the clock."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

REPLAYS = 30
WARM_SECONDS, SUSTAINED_SECONDS, PAUSE_SECONDS = 0.25, 0.4, 0.15
# Of work in one graph: a host that is busy with something else for a while leaves the device none to wait for.
_GRAPH_SECONDS = 0.02


def captured(function: Callable[[], None], calls: int = 1) -> Any:
    """`calls` calls of a function as a CUDA graph, after two runs that compile and warm up."""
    import torch

    for _ in range(2):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    # A graph reads and writes the function's tensors, and the next capture gives unused memory back to the device.
    graph.function = function
    return graph


def interleaved(graphs: dict[str, Any], replays: int = REPLAYS) -> dict[str, float]:
    """Burst: median milliseconds of each graph; all are replayed in turn, and every replay starts with a cold L2."""
    import torch

    flush = torch.empty(64 * 2**20, device="cuda")
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, graph in graphs.items():
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in events.items()}


def sustained(function: Callable[[], None], meter: Meter, milliseconds: float) -> dict[str, float | None]:
    """Back to back for at least 0.4 s, after 0.25 s of the same: milliseconds a call, MHz and W meanwhile (medians).

    milliseconds: about how long one call takes.
    """
    import torch

    calls = max(1, round(1e3 * _GRAPH_SECONDS / milliseconds))
    graph = captured(function, calls)
    torch.cuda.synchronize()
    time.sleep(PAUSE_SECONDS)
    _for_seconds(graph, WARM_SECONDS)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun = time.monotonic()
    start.record()
    replays = _for_seconds(graph, SUSTAINED_SECONDS)
    end.record()
    torch.cuda.synchronize()
    clock, power = meter.between(begun, time.monotonic())
    return {"ms": start.elapsed_time(end) / (replays * calls), "MHz": clock, "W": power}


def _for_seconds(graph: Any, seconds: float) -> int:
    """Replay for so long; returns how often. Two replays are always queued behind the one that is awaited."""
    import torch

    begun, replays = time.monotonic(), 0
    queued: deque[Any] = deque()
    while time.monotonic() - begun < seconds:
        graph.replay()
        replays += 1
        queued.append(torch.cuda.Event())
        queued[-1].record()
        if len(queued) > 2:
            queued.popleft().synchronize()
    return replays


class Meter:
    """Clock and power of the current GPU every 40 ms, from nvidia-smi; without it from torch, if that can say."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float, float]] = []
        self.process: subprocess.Popen[str] | None = None
        self.running = True
        reading = self._from_smi if shutil.which("nvidia-smi") else self._from_torch
        self.thread = threading.Thread(target=reading, daemon=True)

    def __enter__(self) -> Meter:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.running = False
        if self.process is not None:
            self.process.terminate()
        self.thread.join(timeout=2)

    def _from_smi(self) -> None:
        import torch

        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        command = ["nvidia-smi", f"--id={uuid}", "--query-gpu=clocks.sm,power.draw.instant"]
        command += ["--format=csv,noheader,nounits", "-lms", "40"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                clock, power = map(float, line.split(","))
            except ValueError:  # "[N/A]"
                continue
            self.samples.append((time.monotonic(), clock, power))

    def _from_torch(self) -> None:
        import torch

        while self.running:
            try:
                self.samples.append((time.monotonic(), torch.cuda.clock_rate(), torch.cuda.power_draw() / 1000))
            except Exception:  # no pynvml, or a driver that does not tell: nothing is reported then
                return
            time.sleep(0.04)

    def between(self, begun: float, ended: float) -> tuple[float | None, float | None]:
        """Median MHz and W of the samples in that time; None where there are none."""
        found = [(clock, power) for when, clock, power in list(self.samples) if begun < when < ended]
        if not found:
            return None, None
        return statistics.median(c for c, _ in found), statistics.median(p for _, p in found)
