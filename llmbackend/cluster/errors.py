"""What can be wrong with a cluster, as its operators see it.

For: the launcher and the command line. Does not know: what was tried. Invariant: the text says what happened, where,
and what to do.
"""

from __future__ import annotations


class ClusterError(Exception):
    """This machine cannot be, or stay, part of the cluster."""
