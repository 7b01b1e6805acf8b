"""`metric_tags` of a model: labels of all its metrics, besides its name and version.

For: LoadedModel. Does not know: metrics. Invariant: what comes out can be printed as labels: one model's tags must not
spoil the text that a scraper reads of all others. Source: MetricModelReporter::GetMetricLabels; Prometheus' data model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.errors import invalid_argument

_TAG = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_]*")


def metric_tags(config: ModelConfig) -> Mapping[str, str]:
    """The labels, each with an underscore before its name. Raises TritonError INVALID_ARG for a tag that is none."""
    for tag in config.metric_tags:
        if not _TAG.fullmatch(tag):
            raise invalid_argument(
                f"metric tag {tag!a} of model '{config.name}' is no name of a label, expected letters, digits and _"
            )
    return {f"_{tag}": value for tag, value in config.metric_tags.items()}
