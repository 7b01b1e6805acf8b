"""Rows, panels and queries of the Grafana board.

Used by grafana_board.py; independent of Grafana's JSON. Invariants: every query selects `instance`, and `model` if the
metric has one, by the board's variables; tests/deploy runs each of them on a real Prometheus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OF_MODEL = '{instance=~"$instance",model=~"$model"}'
OF_HOST = '{instance=~"$instance"}'

Query = tuple[str, str]
"""Legend and PromQL expression."""


@dataclass(frozen=True)
class Panel:
    """title
    unit         Grafana's id of it
    description  shown on request
    queries
    width        columns of 24
    is_stat      one large number in place of a graph
    maximum      of the vertical axis; None = as the values need
    """

    title: str
    unit: str
    description: str
    queries: Sequence[Query]
    width: int = 8
    is_stat: bool = False
    maximum: float | None = None


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


def rate(metric: str, by: str = "model", selector: str = OF_MODEL) -> str:
    return f"sum by ({by}) (rate({metric}{selector}[$__rate_interval]))"


def increase(metric: str, by: str) -> str:
    return f"sum by ({by}) (increase({metric}{OF_MODEL}[$__rate_interval]))"


def total(metric: str, by: str = "model", selector: str = OF_MODEL) -> str:
    return f"sum by ({by}) ({metric}{selector})"


def quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'le, model')})"


def quantiles(histogram: str) -> list[Query]:
    return [(f"{{{{model}}}} p{share * 100:.0f}", quantile(share, histogram)) for share in (0.5, 0.95, 0.99)]


def mean(histogram: str) -> str:
    return f"{rate(f'{histogram}_sum')} / {rate(f'{histogram}_count')}"


def blocks(kind: str) -> str:
    selector = OF_MODEL.replace("}", f',kv_cache_block_type="{kind}"}}')
    return total("nv_trt_llm_kv_cache_block_metrics", selector=selector)


MODEL = "{{model}}"
HOST = "{{instance}}"
ROWS = (
    Row(
        "Overview",
        (
            Panel(
                "Models ready",
                "percentunit",
                "Share of known model versions that accept requests.",
                [("ready", f"avg(llmbackend:model_ready{OF_MODEL})")],
                4,
                is_stat=True,
                maximum=1,
            ),
            Panel(
                "Requests running",
                "none",
                "In the engines' batches.",
                [("running", f"sum(vllm:num_requests_running{OF_MODEL})")],
                4,
                is_stat=True,
            ),
            Panel(
                "Generated tokens per second",
                "none",
                "Of all models.",
                [("tokens", f"sum(rate(vllm:generation_tokens_total{OF_MODEL}[$__rate_interval]))")],
                4,
                is_stat=True,
            ),
            Panel(
                "First token, p99",
                "s",
                "Arrival to first token, of the slowest model.",
                [("p99", f"max({quantile(0.99, 'vllm:time_to_first_token_seconds')})")],
                4,
                is_stat=True,
            ),
            Panel(
                "KV cache in use",
                "percentunit",
                "Of the fullest model.",
                [("KV", f"max(vllm:kv_cache_usage_perc{OF_MODEL})")],
                4,
                is_stat=True,
                maximum=1,
            ),
            Panel(
                "Engine restarts in one hour",
                "none",
                "Engines that died or hung, and were replaced.",
                [("restarts", f"sum(increase(llmbackend:engine_restarts_total{OF_MODEL}[1h]))")],
                4,
                is_stat=True,
            ),
        ),
    ),
    Row(
        "Traffic",
        (
            Panel(
                "Finished requests",
                "reqps",
                "By finish reason.",
                [("{{model}} {{finished_reason}}", rate("vllm:request_success_total", "model, finished_reason"))],
            ),
            Panel(
                "Tokens per second",
                "none",
                "Prompt tokens include those found in the prefix cache.",
                [
                    ("{{model}} prompt", rate("vllm:prompt_tokens_total")),
                    ("{{model}} generated", rate("vllm:generation_tokens_total")),
                ],
            ),
            Panel(
                "Tokens per request, median and p99",
                "none",
                "Of finished requests.",
                [
                    (f"{{{{model}}}} {what} p{share * 100:.0f}", quantile(share, f"vllm:request_{metric}_tokens"))
                    for what, metric in (("prompt", "prompt"), ("generated", "generation"))
                    for share in (0.5, 0.99)
                ],
            ),
        ),
    ),
    Row(
        "Latency",
        (
            Panel("First token", "s", "Arrival to first token.", quantiles("vllm:time_to_first_token_seconds"), 6),
            Panel("Between tokens", "s", "Of one request.", quantiles("vllm:inter_token_latency_seconds"), 6),
            Panel("Whole request", "s", "Arrival to last token.", quantiles("vllm:e2e_request_latency_seconds"), 6),
            Panel(
                "Where a request spends its time",
                "s",
                "Mean of finished requests: waiting for an engine, until the first token, until the last.",
                [
                    (f"{{{{model}}}} {what}", mean(f"vllm:request_{what}_time_seconds"))
                    for what in ("queue", "prefill", "decode")
                ],
                6,
            ),
        ),
    ),
    Row(
        "Batch and queue",
        (
            Panel(
                "Requests in the batch and waiting",
                "none",
                "Waiting: in the model's queue or in an engine.",
                [
                    ("{{model}} running", total("vllm:num_requests_running")),
                    ("{{model}} waiting", total("vllm:num_requests_waiting")),
                ],
                6,
            ),
            Panel(
                "Time in the queue", "s", "Until an engine takes it.", quantiles("vllm:request_queue_time_seconds"), 6
            ),
            Panel(
                "Preemptions",
                "ops",
                "Running requests whose KV blocks were taken for others; they are recomputed later.",
                [(MODEL, rate("vllm:num_preemptions_total"))],
                6,
            ),
            Panel(
                "Accepted draft tokens",
                "percentunit",
                "Share of speculative draft tokens that were accepted. Empty without speculation.",
                [
                    (
                        MODEL,
                        f"{rate('vllm:spec_decode_num_accepted_tokens_total')}"
                        f" / {rate('vllm:spec_decode_num_draft_tokens_total')}",
                    )
                ],
                6,
                maximum=1,
            ),
        ),
    ),
    Row(
        "KV cache",
        (
            Panel(
                "Usage",
                "percentunit",
                "Share of blocks in use by requests.",
                [(MODEL, f"max by (model) (vllm:kv_cache_usage_perc{OF_MODEL})")],
                6,
                maximum=1,
            ),
            Panel(
                "Blocks",
                "none",
                "Of all engines of the model.",
                [("{{model}} used", blocks("used")), ("{{model}} of", blocks("max"))],
                6,
            ),
            Panel(
                "Prefix cache hits",
                "percentunit",
                "Share of prompt tokens found in the prefix cache.",
                [(MODEL, f"{rate('vllm:prefix_cache_hits_total')} / {rate('vllm:prefix_cache_queries_total')}")],
                6,
                maximum=1,
            ),
            Panel(
                "Blocks copied to host memory and back",
                "ops",
                "0 without kv_offloading_size.",
                [
                    (f"{{{{model}}}} {way}", rate(f"llmbackend:kv_blocks_{way}_total"))
                    for way in ("offloaded", "reloaded")
                ],
                6,
            ),
        ),
    ),
    Row(
        "Recoveries and errors",
        (
            Panel(
                "Engine restarts",
                "none",
                "By cause.",
                [("{{model}} {{cause}}", increase("llmbackend:engine_restarts_total", "model, cause"))],
                6,
            ),
            Panel(
                "Requests continued in a new engine",
                "none",
                "Their clients saw a pause, and no token was lost.",
                [("{{model}} recovered", increase("llmbackend:recovered_requests_total", "model"))],
                6,
            ),
            Panel(
                "Pause of a recovered request",
                "s",
                "Death of its engine to its next output.",
                quantiles("llmbackend:engine_recovery_seconds"),
                6,
            ),
            Panel(
                "Model ready",
                "none",
                "1: it accepts requests.",
                [("{{model}} {{version}} {{instance}}", f"llmbackend:model_ready{OF_MODEL}")],
                6,
                maximum=1,
            ),
            Panel(
                "Failed requests",
                "reqps",
                "REJECTED, refused by the model: full queue or timeout in it. CANCELED: by the client.",
                [
                    ("{{model}} {{reason}}", rate("nv_inference_request_failure", "model, reason")),
                    ("{{model}} refused by the model", rate("llmbackend:refused_requests_total", "model")),
                ],
            ),
            Panel(
                "Requests ended because they killed engines",
                "none",
                "A request that was alone in two engines that died.",
                [(MODEL, increase("llmbackend:poison_requests_total", "model"))],
            ),
            Panel(
                "Failed self-checks",
                "none",
                "A leak or a lost item: a defect of the server, please report it.",
                [
                    (MODEL, increase("llmbackend:invariant_breaches_total", "model")),
                    ("{{model}}, host, since its start", total("llmbackend:core_invariant_breaches_total")),
                ],
            ),
        ),
    ),
    Row(
        "API keys",
        (
            Panel(
                "Requests by decision",
                "reqps",
                "Of access control; empty without API keys and restricted APIs.",
                [("{{key_name}} {{outcome}}", rate("llmbackend:api_requests_total", "key_name, outcome", OF_HOST))],
                12,
            ),
            Panel(
                "Tokens per second",
                "none",
                "By API key.",
                [("{{key_name}} {{kind}}", rate("llmbackend:api_tokens_total", "key_name, kind", OF_HOST))],
                12,
            ),
        ),
    ),
    Row(
        "Host",
        (
            Panel(
                "CPU of the machine",
                "percentunit",
                "All processors.",
                [(HOST, f"nv_cpu_utilization{OF_HOST}")],
                6,
                maximum=1,
            ),
            Panel(
                "Memory of the machine",
                "bytes",
                "Used: all that is not available to new processes.",
                [
                    ("{{instance}} used", f"nv_cpu_memory_used_bytes{OF_HOST}"),
                    ("{{instance}} of", f"nv_cpu_memory_total_bytes{OF_HOST}"),
                ],
                6,
            ),
            Panel(
                "CPU of the host process",
                "none",
                "In processors, without the engines.",
                [(HOST, rate("process_cpu_seconds_total", "instance", OF_HOST))],
                6,
            ),
            Panel(
                "Memory of the host process",
                "bytes",
                "Resident, without the engines.",
                [(HOST, f"process_resident_memory_bytes{OF_HOST}")],
                6,
            ),
            Panel(
                "Open descriptors of the host process",
                "none",
                "And their limit.",
                [("{{instance}} open", f"process_open_fds{OF_HOST}"), ("{{instance}} of", f"process_max_fds{OF_HOST}")],
            ),
            Panel(
                "Delay of the event loop",
                "s",
                "One iteration of the loop that serves all clients, measured at each scrape.",
                [(HOST, f"llmbackend:event_loop_delay_seconds{OF_HOST}")],
            ),
            Panel(
                "Load of a model",
                "s",
                "From starting an engine until its model is loaded.",
                [(MODEL, f"max by (model) (llmbackend:engine_load_seconds{OF_MODEL})")],
            ),
        ),
    ),
)
