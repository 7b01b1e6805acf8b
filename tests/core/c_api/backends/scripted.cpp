// Does what its input, one string, says:
//   "stream N"      N responses by a factory, on a thread of its own, after the release; decoupled. An error ends them
//                   when the request is cancelled
//   "error TEXT"    an error response
//   "refuse TEXT"   Execute returns an error
//   "bls MODEL"     the answer of MODEL to INPUT0 = [7] (INT32), as text
//   "metric"        counts in its own metric, and answers its value
//   "decrement", "set"  answer with the error of doing so with the metric
//   "parameters"    the request's parameters, and one in the response
//   "inputs"        the names of the inputs, and their text or number
//   "late"          releases the request before it sends the response that it made before
#include <cstdio>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "functions.h"

namespace {

struct ModelState {
  std::vector<std::thread> threads;
  TRITONSERVER_MetricFamily* family = nullptr;
  TRITONSERVER_Metric* metric = nullptr;
};

void stream(TRITONBACKEND_ResponseFactory* factory, int count) {
  bool is_cancelled = false;
  for (int i = 0; i < count && !is_cancelled; ++i) {
    TRITONBACKEND_Response* response;
    TRITONBACKEND_ResponseNewFromFactory(&response, factory);
    add_text(response, std::to_string(i));
    TRITONBACKEND_ResponseSend(response, 0, nullptr);
    TRITONBACKEND_ResponseFactoryIsCancelled(factory, &is_cancelled);
  }
  if (is_cancelled) {
    TRITONBACKEND_Response* response;
    Error* error = TRITONSERVER_ErrorNew(ERROR_CANCELLED, "stopped");
    TRITONBACKEND_ResponseNewFromFactory(&response, factory);
    TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, error);
    TRITONSERVER_ErrorDelete(error);
  } else {
    TRITONBACKEND_ResponseFactorySendFlags(factory, RESPONSE_FINAL);
  }
  TRITONBACKEND_ResponseFactoryDelete(factory);
}

// --- an inference on another model ---

Error* allocate(TRITONSERVER_ResponseAllocator*, const char*, size_t byte_size, TRITONSERVER_MemoryType, int64_t, void*,
                void** buffer, void** buffer_userp, TRITONSERVER_MemoryType* type, int64_t* type_id) {
  *buffer = malloc(byte_size);
  *buffer_userp = nullptr;
  *type = MEMORY_CPU;
  *type_id = 0;
  return nullptr;
}

Error* release_buffer(TRITONSERVER_ResponseAllocator*, void* buffer, void*, size_t, TRITONSERVER_MemoryType, int64_t) {
  free(buffer);
  return nullptr;
}

void completed(TRITONSERVER_InferenceResponse* response, uint32_t, void* userp) {
  auto* promise = static_cast<std::promise<std::string>*>(userp);
  if (Error* error = TRITONSERVER_InferenceResponseError(response)) {
    promise->set_value(std::string("error: ") + TRITONSERVER_ErrorMessage(error));
    TRITONSERVER_ErrorDelete(error);
  } else {
    const char* name;
    TRITONSERVER_DataType datatype;
    const int64_t* shape;
    uint64_t dims;
    const void* base;
    size_t byte_size;
    TRITONSERVER_MemoryType type;
    int64_t type_id;
    void* buffer_userp;
    TRITONSERVER_InferenceResponseOutput(response, 0, &name, &datatype, &shape, &dims, &base, &byte_size, &type,
                                         &type_id, &buffer_userp);
    promise->set_value(std::string(name) + "=" + std::to_string(*static_cast<const int32_t*>(base)));
  }
  TRITONSERVER_InferenceResponseDelete(response);
}

Error* infer(TRITONBACKEND_Model* model, const std::string& other, std::string* answer) {
  TRITONSERVER_Server* server;
  TRITONSERVER_InferenceRequest* request;
  TRITONSERVER_ResponseAllocator* allocator;
  TRY(TRITONBACKEND_ModelServer(model, &server));
  TRY(TRITONSERVER_InferenceRequestNew(&request, server, other.c_str(), -1));
  TRY(TRITONSERVER_ResponseAllocatorNew(&allocator, allocate, release_buffer, nullptr));
  const int64_t shape[] = {1};
  const int32_t value = 7;
  std::promise<std::string> promise;
  TRY(TRITONSERVER_InferenceRequestAddInput(request, "INPUT0", TYPE_INT32, shape, 1));
  TRY(TRITONSERVER_InferenceRequestAppendInputData(request, "INPUT0", &value, sizeof value, MEMORY_CPU, 0));
  TRY(TRITONSERVER_InferenceRequestSetReleaseCallback(
      request, [](auto* done, uint32_t, void*) { TRITONSERVER_InferenceRequestDelete(done); }, nullptr));
  TRY(TRITONSERVER_InferenceRequestSetResponseCallback(request, allocator, nullptr, completed, &promise));
  if (Error* error = TRITONSERVER_ServerInferAsync(server, request, nullptr)) {
    TRITONSERVER_InferenceRequestDelete(request);
    return error;
  }
  *answer = promise.get_future().get();
  return TRITONSERVER_ResponseAllocatorDelete(allocator);
}

Error* shown_inputs(TRITONBACKEND_Request* request, std::string* text) {
  uint32_t count;
  TRY(TRITONBACKEND_RequestInputCount(request, &count));
  for (uint32_t i = 0; i < count; ++i) {
    TRITONBACKEND_Input* input;
    const char *name, *data;
    TRITONSERVER_DataType datatype;
    uint64_t byte_size;
    TRY(TRITONBACKEND_RequestInputByIndex(request, i, &input));
    TRY(TRITONBACKEND_InputProperties(input, &name, &datatype, nullptr, nullptr, nullptr, nullptr));
    TRY(read_input(input, &data, &byte_size));
    *text += std::string(name) + "=";
    *text += datatype == TYPE_BYTES ? std::string(data + 4, byte_size - 4)
                                    : std::to_string(*reinterpret_cast<const int32_t*>(data));
    *text += ";";
  }
  return nullptr;
}

Error* shown_parameters(TRITONBACKEND_Request* request, std::string* text) {
  uint32_t count;
  TRY(TRITONBACKEND_RequestParameterCount(request, &count));
  for (uint32_t i = 0; i < count; ++i) {
    const char* key;
    TRITONSERVER_ParameterType type;
    const void* value;
    TRY(TRITONBACKEND_RequestParameter(request, i, &key, &type, &value));
    *text += std::string(key) + "=";
    if (type == PARAMETER_STRING) *text += static_cast<const char*>(value);
    if (type == PARAMETER_INT) *text += std::to_string(*static_cast<const int64_t*>(value));
    if (type == PARAMETER_BOOL) *text += *static_cast<const bool*>(value) ? "true" : "false";
    *text += ";";
  }
  return nullptr;
}

Error* answer(TRITONBACKEND_Model* model, ModelState* state, TRITONBACKEND_Request* request) {
  std::string command, text;
  TRY(command_of(request, &command));
  auto space = command.find(' ');
  std::string verb = command.substr(0, space), argument = space == std::string::npos ? "" : command.substr(space + 1);
  if (verb == "stream") {
    TRITONBACKEND_ResponseFactory* factory;
    TRY(TRITONBACKEND_ResponseFactoryNew(&factory, request));
    TRY(TRITONBACKEND_RequestRelease(request, RELEASE_ALL));
    state->threads.emplace_back(stream, factory, std::stoi(argument));
    return nullptr;
  }
  TRITONBACKEND_Response* response;
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  Error* error = nullptr;
  if (verb == "error") error = TRITONSERVER_ErrorNew(ERROR_UNAVAILABLE, argument.c_str());
  if (verb == "bls") error = infer(model, argument, &text);
  if (verb == "decrement") error = TRITONSERVER_MetricIncrement(state->metric, -1);
  if (verb == "set") error = TRITONSERVER_MetricSet(state->metric, 1);
  if (verb == "metric") {
    TRY(TRITONSERVER_MetricIncrement(state->metric, 1.5));
    double value;
    TRY(TRITONSERVER_MetricValue(state->metric, &value));
    text = std::to_string(value);
  }
  if (verb == "inputs") TRY(shown_inputs(request, &text));
  if (verb == "parameters") {
    TRY(shown_parameters(request, &text));
    TRY(TRITONBACKEND_ResponseSetIntParameter(response, "added", 42));
  }
  if (!error) TRY(add_text(response, text));
  if (verb == "late") TRY(TRITONBACKEND_RequestRelease(request, RELEASE_ALL));
  TRY(TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, error));
  if (error) TRITONSERVER_ErrorDelete(error);
  return verb == "late" ? nullptr : TRITONBACKEND_RequestRelease(request, RELEASE_ALL);
}

}  // namespace

EXPORTED Error* TRITONBACKEND_GetBackendAttribute(TRITONBACKEND_Backend*, TRITONBACKEND_BackendAttribute* attributes) {
  return TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(attributes, KIND_CPU, 2, nullptr, 0);
}

EXPORTED Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  const char *name, *json;
  size_t size;
  TRITONSERVER_Message* config;
  TRY(TRITONBACKEND_ModelName(model, &name));
  TRY(TRITONBACKEND_ModelConfig(model, 1, &config));
  TRY(TRITONSERVER_MessageSerializeToJson(config, &json, &size));
  bool is_broken = std::string(json, size).find("\"broken\"") != std::string::npos;
  TRY(TRITONSERVER_MessageDelete(config));
  if (is_broken) return TRITONSERVER_ErrorNew(ERROR_INVALID_ARG, "the model is broken");
  TRY(TRITONSERVER_LogMessage(LOG_INFO, "scripted.cpp", 7, (std::string("initialised ") + name).c_str()));
  auto state = std::make_unique<ModelState>();
  TRY(TRITONSERVER_MetricFamilyNew(&state->family, METRIC_COUNTER, "scripted_requests", "Requests counted"));
  auto* label = TRITONSERVER_ParameterNew("model", PARAMETER_STRING, name);
  const TRITONSERVER_Parameter* labels[] = {label};
  TRY(TRITONSERVER_MetricNew(&state->metric, state->family, labels, 1));
  TRITONSERVER_ParameterDelete(label);
  return TRITONBACKEND_ModelSetState(model, state.release());
}

EXPORTED Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  void* slot;
  TRY(TRITONBACKEND_ModelState(model, &slot));
  if (!slot) return nullptr;
  std::unique_ptr<ModelState> state(static_cast<ModelState*>(slot));
  for (auto& thread : state->threads) thread.join();
  TRY(TRITONSERVER_MetricDelete(state->metric));
  return TRITONSERVER_MetricFamilyDelete(state->family);
}

EXPORTED Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                   TRITONBACKEND_Request** requests, uint32_t count) {
  TRITONBACKEND_Model* model;
  void* state;
  TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
  TRY(TRITONBACKEND_ModelState(model, &state));
  for (uint32_t i = 0; i < count; ++i) {
    std::string command;
    TRY(command_of(requests[i], &command));
    if (command.rfind("refuse ", 0) == 0) return TRITONSERVER_ErrorNew(ERROR_UNSUPPORTED, command.c_str() + 7);
    TRY(answer(model, static_cast<ModelState*>(state), requests[i]));
  }
  return nullptr;
}
