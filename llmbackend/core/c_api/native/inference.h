// The objects of a backend's inferences on other models.
#pragma once

#include <cstring>

#include "objects.h"

struct TRITONSERVER_ResponseAllocator {
  AllocateFn allocate = nullptr;
  ReleaseBufferFn release = nullptr;
  StartFn start = nullptr;
  BufferAttributesFn attributes = nullptr;
};

// Where the responses of one inference go, and how its request is returned.
struct Delivery {
  TRITONSERVER_ResponseAllocator* allocator = nullptr;
  TRITONSERVER_ResponseAllocator functions;  // the allocator's: its owner may delete it before the last response
  void* allocator_userp = nullptr;
  ResponseCompleteFn complete = nullptr;
  void* userp = nullptr;
  TRITONSERVER_InferenceRequest* request = nullptr;
  RequestReleaseFn release = nullptr;
  void* release_userp = nullptr;
  std::atomic<int> holders{2};  // of the request: ServerInferAsync and the final response

  // Returns the request through its callback when the last holder calls this. Without the GIL.
  void let_go() {
    if (holders.fetch_sub(1) == 1 && release) release(request, RELEASE_ALL, release_userp);
  }
};
constexpr const char* DELIVERY = "llmbackend.Delivery";

struct InferenceInput : Shape {
  std::vector<std::pair<const char*, size_t>> parts;  // the caller's memory
  std::string bytes;                                  // the parts, joined when the inference starts
};

struct TRITONSERVER_InferenceRequest {
  std::string model_name, id, correlation_text;
  int64_t model_version = -1;
  uint64_t correlation_id = 0, priority = 0, timeout_us = 0;
  bool has_text_correlation = false, is_cancelled = false;
  uint32_t flags = 0;
  std::vector<InferenceInput> inputs;
  std::vector<std::string> outputs;
  Parameters parameters;
  RequestReleaseFn release = nullptr;
  void* release_userp = nullptr;
  TRITONSERVER_ResponseAllocator* allocator = nullptr;
  void* allocator_userp = nullptr;
  ResponseCompleteFn complete = nullptr;
  void* complete_userp = nullptr;
  Ref handle;  // core's InferenceHandle, once it was started
};

struct InferenceOutput : Shape {
  void* base = nullptr;
  void* userp = nullptr;
  size_t byte_size = 0;
  TRITONSERVER_MemoryType memory_type = MEMORY_CPU;
  int64_t memory_type_id = 0;
  TRITONSERVER_ResponseAllocator* allocator = nullptr;
  ReleaseBufferFn release = nullptr;  // null = there is no memory to release
};

struct TRITONSERVER_InferenceResponse {
  std::string model_name, id;
  int64_t model_version = 0;
  std::vector<InferenceOutput> outputs;
  Parameters parameters;
  std::unique_ptr<Error> error;

  ~TRITONSERVER_InferenceResponse();
};

PyObject* deliver(PyObject* module, PyObject* arguments);
