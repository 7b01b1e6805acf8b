"""One thread for what pb_utils gives no event for: which requests were cancelled, and metrics that changed.

For: TritonBackend. Does not know: requests, metrics. Why it polls: inside Triton's stub a cancel can only be asked for,
and each question is a round trip between processes. Invariants: with no live request and no changed metric it sleeps
without a timeout; otherwise it is at work for at most DUTY of the time, however many requests live; nothing that fails
here ends it, or the stub.
"""

from __future__ import annotations

import logging
import threading
import time

from .channel import CancelWatch
from .metrics import MetricBuffer

logger = logging.getLogger(__name__)

SHORTEST_PAUSE_S = 0.01
METRICS_PERIOD_S = 0.1
DUTY = 0.05


class Chores:
    def __init__(self) -> None:
        self._work = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="llm-chores", daemon=True)
        self._metrics_flushed_s = 0.0
        self.watch = CancelWatch(self._wake)
        self.metrics = MetricBuffer(self._wake)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """After the last request has ended; the metrics go, too."""
        self._stopping.set()
        self._work.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.metrics.close()

    def _wake(self) -> None:
        if not self._work.is_set():
            self._work.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._work.wait()
            self._work.clear()
            start_s = time.monotonic()
            try:
                self.watch.ask_all()
                metrics_wait = self._flush_metrics()
            except Exception:
                logger.exception("asking Triton for cancelled requests, or telling it metrics, failed")
                metrics_wait = False
            if len(self.watch) or metrics_wait:
                self._work.set()
            now_s = time.monotonic()
            self._stopping.wait(max(SHORTEST_PAUSE_S, (now_s - start_s) / DUTY))

    def _flush_metrics(self) -> bool:
        """Whether it was too early for that."""
        if time.monotonic() - self._metrics_flushed_s < METRICS_PERIOD_S:
            return True
        self.metrics.flush()
        self._metrics_flushed_s = time.monotonic()
        return False
