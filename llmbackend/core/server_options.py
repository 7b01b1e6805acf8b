"""The options of a host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from llmbackend.fork_server.host_policy import HostPolicy

from .metrics.metrics_options import MetricsOptions
from .scheduling.rate_limiter import RateLimitMode, RateLimitResource
from .tracing.trace import TraceSettings


@dataclass(frozen=True)
class ServerOptions:
    """Names and defaults are those of Triton's command line.

    server_id: the server's name in its metadata
    repository_poll_secs: seconds between two polls in mode poll; 0 = no polls
    startup_models: models to load at startup in mode explicit; ["*"] = all
    backend_directory, repoagent_directory: directories of backends and repository agents, each in `<name>/`
    backend_config: settings by backend; "" = every backend
    exit_on_error: `start` fails if a startup model fails
    model_load_retry_count: retries of a failed load
    model_config_name: a model's `configs/<name>.pbtxt` replaces its config.pbtxt; "" = none
    model_namespacing: models of different repositories may have the same name
    cache_config: settings by response cache
    cache_directory: directory of response caches in shared libraries, each in `<name>/`
    host_policies: by name, the resources to which the instances of a group are bound
    starts_instances: False = models are initialised without instances, for forecasts
    """

    model_repositories: Sequence[Path] = ()
    server_id: str = "triton"
    model_control_mode: Literal["none", "poll", "explicit"] = "none"
    repository_poll_secs: float = 15.0
    startup_models: Sequence[str] = ()
    backend_directory: Path | None = None
    backend_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    strict_readiness: bool = True
    exit_on_error: bool = True
    model_load_thread_count: int = 4
    model_load_retry_count: int = 0
    auto_complete_config: bool = True
    starts_instances: bool = True
    model_config_name: str = ""
    model_namespacing: bool = False
    repoagent_directory: Path | None = None
    allow_client_shm: bool = False
    metrics: MetricsOptions = field(default_factory=MetricsOptions)
    cache_config: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    cache_directory: Path | None = None
    host_policies: Mapping[str, HostPolicy] = field(default_factory=dict)
    rate_limit: RateLimitMode = "off"
    rate_limit_resources: Sequence[RateLimitResource] = ()
    trace: TraceSettings = field(default_factory=TraceSettings)
