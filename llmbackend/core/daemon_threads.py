"""DaemonThreadPool: threads for jobs that may hang, such as readiness probes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], None]


class DaemonThreadPool:
    """Keeps one idle thread for the next job. Thread-safe.

    A job that hangs delays no other as long as another thread can be started. If none can (a process limit), jobs wait
    for the existing threads, so that a server that has answered one probe keeps answering. Every job accepted by `run`
    is executed, even after `close`. Not a ThreadPoolExecutor: at exit the interpreter waits for its threads, even if
    they hang.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_free = 0
        """Threads waiting for a job, minus jobs waiting for a thread."""
        self._is_closed = False

    def run(self, job: Job) -> None:
        """Runs `job`, which must not raise, on a thread. Raises RuntimeError if there is none and none can be
        started."""
        with self._lock:
            if self._num_free <= 0:
                self._start()
            self._num_free -= 1
            self._jobs.put(job)

    def close(self) -> None:
        """To be called after the last `run`: each thread ends when no job is left."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._num_free):
                self._jobs.put(None)
            self._num_threads -= max(self._num_free, 0)
            self._num_free = min(self._num_free, 0)

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        except RuntimeError:
            if not self._num_threads:
                raise
            return
        self._num_threads += 1
        self._num_free += 1

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it may own these threads
            with self._lock:
                if self._num_free > 0 or (self._is_closed and not self._num_free):
                    self._num_threads -= 1
                    return
                self._num_free += 1
