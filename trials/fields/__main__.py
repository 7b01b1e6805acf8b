"""`python -m trials.fields`: sends every field of every API to a server, and writes docs/fields.md.

The last line is `fields: N sent, D done, R refused, L labels, 0 ignored`. Exits with 1 if a field is ignored.
"""

from __future__ import annotations

import sys
from collections import Counter

from .page import PAGE, page
from .run import DONE, IGNORED, LABEL, REFUSED, Outcome, field_names, field_server, outcomes


def _tell(outcome: Outcome) -> None:
    print(f"{outcome.endpoint:27} {outcome.field:31} {outcome.kind:9}{outcome.text}", flush=True)


def main() -> int:
    with field_server() as server:
        found = outcomes(server, field_names(), _tell)
    count = Counter(outcome.kind for outcome in found)
    if not count[IGNORED]:
        PAGE.write_text(page(found))
    print(
        f"fields: {len(found)} sent, {count[DONE]} done, {count[REFUSED]} refused, {count[LABEL]} labels, "
        f"{count[IGNORED]} ignored"
    )
    return int(count[IGNORED] > 0)


if __name__ == "__main__":
    sys.exit(main())
