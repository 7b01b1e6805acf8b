"""How a bug of ours is logged: where and of what type, but not with its text, which may quote what a client sent.

For: the places of this package that catch what nobody foresaw. Does not know: protocols. Invariant: no prompt reaches
the log above debug level (`--log-verbose=1` adds the text).
"""

from __future__ import annotations

import logging
import traceback

from llmbackend.log_repeats import CAUSE, cause_of

log = logging.getLogger(__name__)


def log_bug(what: str, error: BaseException) -> None:
    """One error line with the frames of `error` and of what caused it; once a minute for each cause."""
    places = "".join(
        f"{type(cause).__name__}:\n{''.join(traceback.format_tb(cause.__traceback__))}" for cause in _chain(error)
    )
    log.error("%s: %s", what, places.rstrip(), extra={CAUSE: cause_of(error)})
    log.debug("%s: %s", what, error)


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain[::-1]
