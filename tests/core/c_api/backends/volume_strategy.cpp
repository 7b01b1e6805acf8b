// A batching strategy: at most 24 bytes of inputs in one batch.
#include "backend.h"

EXPORTED Error* TRITONBACKEND_ModelBatcherInitialize(TRITONBACKEND_Batcher** batcher, TRITONBACKEND_Model*) {
  *batcher = reinterpret_cast<TRITONBACKEND_Batcher*>(new uint64_t(24));
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelBatcherFinalize(TRITONBACKEND_Batcher* batcher) {
  delete reinterpret_cast<uint64_t*>(batcher);
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelBatchInitialize(const TRITONBACKEND_Batcher* batcher, void** batch) {
  *batch = new uint64_t(*reinterpret_cast<const uint64_t*>(batcher));
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelBatchFinalize(void* batch) {
  delete static_cast<uint64_t*>(batch);
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelBatchIncludeRequest(TRITONBACKEND_Request* request, void* batch, bool* included) {
  TRITONBACKEND_Input* input;
  const char* data;
  uint64_t byte_size, *left = static_cast<uint64_t*>(batch);
  TRY(TRITONBACKEND_RequestInputByIndex(request, 0, &input));
  TRY(read_input(input, &data, &byte_size));
  *included = byte_size <= *left;
  if (*included) *left -= byte_size;
  return nullptr;
}
