"""The RPCs TraceSetting and LogSettings.

For: the gRPC servicer. Does not know: what the settings do. Invariant: the answer is the settings as they are after the
change. Source: grpc_service.proto and Triton's grpc_server.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from llmbackend.core.inference_server import InferenceServer
from llmbackend.server_log import ServerLog

from . import log_settings, trace_settings


async def trace_setting(server: InferenceServer, request: Any) -> Any:
    changes = partial(trace_settings.changes_from_proto, request.settings) if request.settings else None
    settings = await asyncio.to_thread(trace_settings.updated, server, request.model_name, changes)
    response = pb.TraceSettingResponse()
    for key, values in trace_settings.shown(settings).items():
        response.settings[key].value.extend(values)
    return response


def log_setting(log: ServerLog, request: Any) -> Any:
    if request.settings:
        log.update(**log_settings.changes_from_proto(request.settings))
    response = pb.LogSettingsResponse()
    for key, value in log_settings.shown(log.settings).items():
        if isinstance(value, bool):
            response.settings[key].bool_param = value
        elif isinstance(value, int):
            response.settings[key].uint32_param = value
        else:
            response.settings[key].string_param = value
    return response
