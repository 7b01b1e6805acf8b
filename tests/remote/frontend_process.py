"""A frontend in a process of its own, with one open request.

`python -m tests.remote.frontend_process ENDPOINT ID [PUBLIC_KEY SECRET_KEY]`
"""

from __future__ import annotations

import asyncio
import sys

from llmbackend.core.messages import InferenceRequest
from llmbackend.core.tensors import Tensor
from llmbackend.links.secrets import ClusterSecrets
from llmbackend.remote.remote_server import RemoteServer


async def main() -> None:
    endpoint, id, *keys = sys.argv[1:]
    server = RemoteServer([endpoint], keys=ClusterSecrets(*(key.encode() for key in keys)) if keys else None)
    await server.start(30)
    text = Tensor.text("text_input", "n=9 sleep=60000")
    server.infer_async(InferenceRequest("llm", id=id, inputs=(text,)), lambda response, flags: None)
    loaded = [name for name in sys.modules if name.split(".")[0] == "torch"]
    loaded += [name for name in sys.modules if name.startswith(("llmbackend.adapter", "llmbackend.engine"))]
    print("open", loaded, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
