// Sums up a sequence in its implicit state, and answers with what it was given: the sum, the number of elements that
// the state had, the controls, the correlation id, the flags, the size of the batch. A value of -1 in the input asks
// for wrong calls, -2 for a state that is not updated, -3 for a state of one more element.
#include <cmath>
#include <numeric>
#include <vector>

#include "functions.h"

namespace {

struct Tensor {
  std::vector<int64_t> shape;
  std::string bytes;
  TRITONSERVER_DataType datatype = TYPE_INVALID;

  template <typename T>
  std::vector<T> values() const {
    auto* data = reinterpret_cast<const T*>(bytes.data());
    return std::vector<T>(data, data + bytes.size() / sizeof(T));
  }
};

Error* read_tensor(TRITONBACKEND_Request* request, const char* name, Tensor* tensor) {
  TRITONBACKEND_Input* input;
  const int64_t* shape;
  const char* data;
  uint32_t dims;
  uint64_t byte_size;
  TRY(TRITONBACKEND_RequestInput(request, name, &input));
  TRY(TRITONBACKEND_InputProperties(input, nullptr, &tensor->datatype, &shape, &dims, nullptr, nullptr));
  TRY(read_input(input, &data, &byte_size));
  tensor->shape.assign(shape, shape + dims);
  tensor->bytes.assign(data, byte_size);
  return nullptr;
}

Error* update_state(TRITONBACKEND_Request* request, std::vector<int64_t> shape, const std::vector<float>& values) {
  TRITONBACKEND_State* state;
  TRITONSERVER_BufferAttributes* attributes;
  void* buffer;
  size_t byte_size = values.size() * sizeof(float);
  TRITONSERVER_MemoryType memory = MEMORY_CPU;
  int64_t id = 0;
  TRY(TRITONBACKEND_StateNew(&state, request, "STATE_OUT", TYPE_FP32, shape.data(), shape.size()));
  TRY(TRITONBACKEND_StateBuffer(state, &buffer, byte_size, &memory, &id));
  memcpy(buffer, values.data(), byte_size);
  TRY(TRITONBACKEND_StateBufferAttributes(state, &attributes));
  TRY(TRITONSERVER_BufferAttributesByteSize(attributes, &byte_size));
  if (byte_size != values.size() * sizeof(float)) return TRITONSERVER_ErrorNew(ERROR_INTERNAL, "the size differs");
  return TRITONBACKEND_StateUpdate(state);
}

void wrong_calls(TRITONBACKEND_Request* request, Report& report) {
  TRITONBACKEND_State* state;
  void* buffer;
  TRITONSERVER_MemoryType memory = MEMORY_GPU;
  int64_t id = 1;
  const int64_t shape[] = {1};
  report.call("StateNew X", TRITONBACKEND_StateNew(&state, request, "X", TYPE_FP32, shape, 1));
  report.call("StateNew by its input's name", TRITONBACKEND_StateNew(&state, request, "STATE_IN", TYPE_FP32, shape, 1));
  report.call("StateNew", TRITONBACKEND_StateNew(&state, request, "STATE_OUT", TYPE_FP32, shape, 1));
  report.call("Update without a buffer", TRITONBACKEND_StateUpdate(state));
  VALUE("Buffer, asked of a GPU", TRITONBACKEND_StateBuffer(state, &buffer, 4, &memory, &id), memory + id);
  report.call("Buffer again", TRITONBACKEND_StateBuffer(state, &buffer, 3, &memory, &id));
  report.call("Update with 3 bytes for [1]", TRITONBACKEND_StateUpdate(state));
  report.call("Release to be rescheduled", TRITONBACKEND_RequestRelease(request, RELEASE_RESCHEDULE));
}

Error* correlation(TRITONBACKEND_Request* request, std::string* text) {
  uint64_t number;
  const char* name;
  Error* error = TRITONBACKEND_RequestCorrelationId(request, &number);
  if (!error) {
    *text = std::to_string(number);
    return nullptr;
  }
  TRITONSERVER_ErrorDelete(error);
  TRY(TRITONBACKEND_RequestCorrelationIdString(request, &name));
  *text = std::string("'") + name + "'";
  return nullptr;
}

Error* run(TRITONBACKEND_Request* request, uint32_t batch, bool* is_null) {
  Tensor input, state, start, end, ready, id;
  TRY(read_tensor(request, "READY", &ready));
  *is_null = ready.values<int32_t>()[0] == 0;
  if (*is_null) return nullptr;
  TRY(read_tensor(request, "INPUT0", &input));
  TRY(read_tensor(request, "STATE_IN", &state));
  TRY(read_tensor(request, "START", &start));
  TRY(read_tensor(request, "END", &end));
  TRY(read_tensor(request, "ID", &id));
  auto values = state.values<float>();
  float value = input.values<float>()[0];
  Report report;
  if (value == -1) {
    wrong_calls(request, report);
  } else {
    values[0] += std::abs(value);
    if (value == -3) values.push_back(0);
    auto shape = state.shape;
    shape.back() = values.size();
    if (value != -2) TRY(update_state(request, shape, values));
    uint32_t flags;
    std::string name;
    TRY(TRITONBACKEND_RequestFlags(request, &flags));
    TRY(correlation(request, &name));
    report.value("sum", values[0]);
    report.value("elements", state.values<float>().size());
    report.value("start", start.values<int32_t>()[0]);
    report.value("end", end.values<int32_t>()[0]);
    report.value("flags", flags);
    report.value("id", name);
    report.value("ID", id.datatype == TYPE_BYTES ? id.bytes.substr(4) : std::to_string(id.values<uint64_t>()[0]));
    report.value("batch", batch);
  }
  TRITONBACKEND_Response* response;
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  std::string data = serialized(report.text());
  std::vector<int64_t> shape(input.shape.size(), 1);
  TRY(add_output(response, "OUTPUT0", TYPE_BYTES, shape.data(), shape.size(), data.data(), data.size()));
  return TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, nullptr);
}

}  // namespace

EXPORTED Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request** requests,
                                                   uint32_t count) {
  uint32_t nulls = 0;
  for (uint32_t i = 0; i < count; ++i) {
    Tensor ready;
    TRY(read_tensor(requests[i], "READY", &ready));
    nulls += ready.values<int32_t>()[0] == 0;
  }
  for (uint32_t i = 0; i < count; ++i) {
    bool is_null = false;
    if (Error* error = run(requests[i], count - nulls, &is_null)) {
      TRITONBACKEND_Response* response;
      TRY(TRITONBACKEND_ResponseNew(&response, requests[i]));
      TRY(TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, error));
      TRITONSERVER_ErrorDelete(error);
    } else if (is_null) {
      TRITONBACKEND_ResponseFactory* factory;
      TRY(TRITONBACKEND_ResponseFactoryNew(&factory, requests[i]));
      TRY(TRITONBACKEND_ResponseFactorySendFlags(factory, RESPONSE_FINAL));
      TRY(TRITONBACKEND_ResponseFactoryDelete(factory));
    }
    TRY(TRITONBACKEND_RequestRelease(requests[i], RELEASE_ALL));
  }
  return nullptr;
}
