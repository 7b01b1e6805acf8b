"""What holds for every test: the hypothesis profiles.

Profiles (`--hypothesis-profile=NAME`): `suite`, the default, tries the same examples every time; `search` tries 50
times as many in the stateful tests (tests/properties/machine_settings.py), new ones each time.
"""

from __future__ import annotations

from hypothesis import Phase, settings

# The first failure is shrunk, within the time that a test has; the search may take its time over every one.
settings.register_profile(
    "suite",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=100,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
)
settings.register_profile("search", derandomize=False, deadline=None, max_examples=5000, print_blob=True)
settings.load_profile("suite")
