import asyncio, json, sys, numpy as np, triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        async def one(r):
            s = r.get_response_sender()
            t = pb_utils.get_input_tensor_by_name(r, "text_input").as_numpy()[0].decode()
            if t == "api":
                info = {
                    "pb_utils": [x for x in dir(pb_utils) if not x.startswith("__")],
                    "request": [x for x in dir(r) if not x.startswith("__")],
                    "sender": [x for x in dir(s) if not x.startswith("__")],
                    "InferenceResponse": [x for x in dir(pb_utils.InferenceResponse) if not x.startswith("__")],
                    "Tensor": [x for x in dir(pb_utils.Tensor) if not x.startswith("__")],
                    "python": sys.version.split()[0],
                    "exe": sys.executable,
                    "prefix": sys.prefix,
                    "path": sys.path,
                    "argv": sys.argv[:1],
                    "numpy": np.__version__,
                }
                s.send(
                    pb_utils.InferenceResponse(
                        [pb_utils.Tensor("text_output", np.array([json.dumps(info, indent=1).encode()], dtype=object))]
                    )
                )
            else:
                for i in range(3):
                    await asyncio.sleep(0.1)
                    s.send(
                        pb_utils.InferenceResponse(
                            [pb_utils.Tensor("text_output", np.array([b" a%d" % i], dtype=object))]
                        )
                    )
            s.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

        await asyncio.gather(*[one(r) for r in requests])
