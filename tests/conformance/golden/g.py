# module used by the gRPC transcripts
import grpc, struct, time
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc as rpc

ch = grpc.insecure_channel("127.0.0.1:18001")
S = rpc.GRPCInferenceServiceStub(ch)


def call(f, req, **kw):
    try:
        r = f(req, **kw)
        print("OK", type(r).__name__, "{", str(r).replace("\n", " ").strip(), "}")
        return r
    except grpc.RpcError as e:
        print("ERR", e.code().name, repr(e.details()), dict(e.trailing_metadata() or ()) or "")


def text(s, model="llm", **kw):
    r = pb.ModelInferRequest(model_name=model, **kw)
    i = r.inputs.add(name="text_input", datatype="BYTES")
    i.shape.extend([1])
    i.contents.bytes_contents.append(s.encode())
    return r


def show(m):
    print(
        "  msg",
        "error_message=%r" % m.error_message if m.error_message else "",
        str(m.infer_response).replace("\n", " ").strip(),
    )


def stream(reqs, **kw):
    try:
        for m in S.ModelStreamInfer(iter(reqs), **kw):
            show(m)
        print("stream end: OK")
    except grpc.RpcError as e:
        print("stream end: ERR", e.code().name, repr(e.details()))
