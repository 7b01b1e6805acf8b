// The functions of TRITONSERVER_Server that backends call, and the traces of requests.

#include "objects.h"

namespace {

// Asks a method of the model in whose name the server is used: method(model, version).
Error* ask(bool* answer, TRITONSERVER_Server* server, const char* method, const char* model, long long version) {
  Ref value;
  if (Error* error = call_method(server->model, method, Py_BuildValue("(sL)", model, version), &value)) return error;
  *answer = PyObject_IsTrue(value.get()) == 1;
  return nullptr;
}

}  // namespace

EXPORTED Error* TRITONSERVER_ServerIsLive(TRITONSERVER_Server*, bool* live) {
  *live = true;  // a backend of a server that is not live does not run
  return nullptr;
}

EXPORTED Error* TRITONSERVER_ServerModelIsReady(TRITONSERVER_Server* server, const char* name, int64_t version,
                                                bool* ready) {
  Locked lock;
  return ask(ready, server, "is_model_ready", name, version);
}

EXPORTED Error* TRITONSERVER_ServerModelTransactionProperties(TRITONSERVER_Server* server, const char* name,
                                                              int64_t version, uint32_t* flags, void** detail) {
  if (detail) *detail = nullptr;
  Locked lock;
  bool is_decoupled = false;
  if (Error* error = ask(&is_decoupled, server, "is_decoupled", name, version)) return error;
  *flags = is_decoupled ? TXN_DECOUPLED : TXN_ONE_TO_ONE;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_ServerLoadModelWithParameters(TRITONSERVER_Server* server, const char* name,
                                                           const TRITONSERVER_Parameter** parameters, uint64_t count) {
  Parameters copies;
  for (uint64_t i = 0; i < count; ++i) copies.push_back(*parameters[i]);
  Locked lock;
  Ref dict(parameter_dict(copies));
  if (!dict) return take_exception();
  return host_call("load_model", Py_BuildValue("(OsO)", server->model, name, dict.get()));
}

EXPORTED Error* TRITONSERVER_ServerLoadModel(TRITONSERVER_Server* server, const char* name) {
  return TRITONSERVER_ServerLoadModelWithParameters(server, name, nullptr, 0);
}

EXPORTED Error* TRITONSERVER_ServerUnloadModel(TRITONSERVER_Server* server, const char* name) {
  Locked lock;
  return call_method(server->model, "unload_model", Py_BuildValue("(sO)", name, Py_False));
}

EXPORTED Error* TRITONSERVER_ServerUnloadModelAndDependents(TRITONSERVER_Server* server, const char* name) {
  Locked lock;
  return call_method(server->model, "unload_model", Py_BuildValue("(sO)", name, Py_True));
}

// --- traces -------------------------------------------------------------------------------------------------------------

TRITONSERVER_InferenceTrace::~TRITONSERVER_InferenceTrace() {
  if (!trace) return;
  Locked lock;
  trace = Ref();
}

EXPORTED Error* TRITONSERVER_InferenceTraceDelete(TRITONSERVER_InferenceTrace* trace) {
  delete trace;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceTraceContext(TRITONSERVER_InferenceTrace* trace, const char** context) {
  *context = trace->context.c_str();
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceTraceSetContext(TRITONSERVER_InferenceTrace* trace, const char* context) {
  trace->context = context;
  return nullptr;
}

// The child is the same trace here: an inference made with it is recorded as its part (core/tracing/trace.py).
EXPORTED Error* TRITONSERVER_InferenceTraceSpawnChildTrace(TRITONSERVER_InferenceTrace* trace,
                                                           TRITONSERVER_InferenceTrace** child) {
  *child = nullptr;
  if (!trace) return nullptr;
  Locked lock;
  *child = new TRITONSERVER_InferenceTrace{Ref::borrowed(trace->trace.get()), trace->context};
  return nullptr;
}

EXPORTED const char* TRITONSERVER_InferenceTraceLevelString(int level) {
  switch (level) {
    case 0: return "DISABLED";
    case 1: return "MIN";
    case 2: return "MAX";
    case 4: return "TIMESTAMPS";
    case 8: return "TENSORS";
    default: return "<unknown>";
  }
}

EXPORTED const char* TRITONSERVER_InferenceTraceActivityString(int activity) {
  static constexpr const char* NAMES[] = {
      "REQUEST_START", "QUEUE_START", "COMPUTE_START",      "COMPUTE_INPUT_END",    "COMPUTE_OUTPUT_START",
      "COMPUTE_END",   "REQUEST_END", "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_INPUT", "TENSOR_BACKEND_OUTPUT"};
  return static_cast<size_t>(activity) < std::size(NAMES) ? NAMES[activity] : "<unknown>";
}
