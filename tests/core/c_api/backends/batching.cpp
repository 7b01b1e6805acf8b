// Shows each request the batch that it was in: how many requests, the shape of each one's input, and the outputs that
// it asked for, of which it gets only those. A request with a parameter gets all outputs. Reports statistics.
#include <vector>

#include "functions.h"

namespace {

Error* shape_of(TRITONBACKEND_Request* request, std::vector<int64_t>* shape) {
  TRITONBACKEND_Input* input;
  const int64_t* dims;
  uint32_t count;
  TRY(TRITONBACKEND_RequestInputByIndex(request, 0, &input));
  TRY(TRITONBACKEND_InputProperties(input, nullptr, nullptr, &dims, &count, nullptr, nullptr));
  shape->assign(dims, dims + count);
  return nullptr;
}

Error* requested_outputs(TRITONBACKEND_Request* request, std::vector<std::string>* names) {
  uint32_t count;
  TRY(TRITONBACKEND_RequestOutputCount(request, &count));
  for (uint32_t i = 0; i < count; ++i) {
    const char* name;
    TRY(TRITONBACKEND_RequestOutputName(request, i, &name));
    names->push_back(name);
  }
  return nullptr;
}

Error* answer(TRITONBACKEND_Request* request, const std::string& batch) {
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  TRITONBACKEND_Response* response;
  uint32_t parameters;
  TRY(shape_of(request, &shape));
  TRY(requested_outputs(request, &names));
  TRY(TRITONBACKEND_RequestParameterCount(request, &parameters));
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  if (parameters) names = {"OUTPUT0", "OUTPUT1"};
  for (const auto& name : names) {
    std::string row = serialized(batch + " " + name), data;
    for (int64_t i = 0; i < shape[0]; ++i) data += row;
    const int64_t output_shape[] = {shape[0], 1};
    TRY(add_output(response, name.c_str(), TYPE_BYTES, output_shape, 2, data.data(), data.size()));
  }
  return TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, nullptr);
}

}  // namespace

EXPORTED Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  TRITONSERVER_Message* config;
  const char* json;
  size_t size;
  TRY(TRITONBACKEND_ModelConfig(model, 1, &config));
  TRY(TRITONSERVER_MessageSerializeToJson(config, &json, &size));
  TRY(TRITONSERVER_LogMessage(LOG_INFO, "batching.cpp", 1, json));
  return TRITONSERVER_MessageDelete(config);
}

EXPORTED Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                   TRITONBACKEND_Request** requests, uint32_t count) {
  uint64_t start_ns = now_ns(), total = 0;
  std::string batch = std::to_string(count) + ":";
  for (uint32_t i = 0; i < count; ++i) {
    std::vector<int64_t> shape;
    TRY(shape_of(requests[i], &shape));
    total += shape[0];
    for (int64_t dim : shape) batch += std::to_string(dim) + "x";
    batch += ",";
  }
  for (uint32_t i = 0; i < count; ++i) {
    TRY(answer(requests[i], batch));
    uint64_t end_ns = now_ns();
    TRY(TRITONBACKEND_ModelInstanceReportStatistics(instance, requests[i], true, start_ns, start_ns + 1, end_ns - 1,
                                                    end_ns));
    TRY(TRITONBACKEND_RequestRelease(requests[i], RELEASE_ALL));
  }
  uint64_t end_ns = now_ns();
  return TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, total, start_ns, start_ns + 1, end_ns - 1, end_ns);
}
