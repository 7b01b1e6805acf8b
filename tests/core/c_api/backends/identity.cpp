// Answers each request with its own inputs, OUTPUTn for INPUTn. Counts its life cycle in the model's and the instance's
// state, and reports statistics.
#include "backend.h"

EXPORTED Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  uint32_t major, minor;
  TRY(TRITONBACKEND_ApiVersion(&major, &minor));
  if (major != 1 || minor < 19) return TRITONSERVER_ErrorNew(ERROR_UNSUPPORTED, "too old");
  return TRITONBACKEND_BackendSetState(backend, new int(0));
}

EXPORTED Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend) {
  void* state;
  TRY(TRITONBACKEND_BackendState(backend, &state));
  delete static_cast<int*>(state);
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                   TRITONBACKEND_Request** requests, uint32_t count) {
  uint64_t start_ns = now_ns();
  for (uint32_t i = 0; i < count; ++i) {
    TRITONBACKEND_Response* response;
    TRY(TRITONBACKEND_ResponseNew(&response, requests[i]));
    uint32_t inputs;
    TRY(TRITONBACKEND_RequestInputCount(requests[i], &inputs));
    for (uint32_t j = 0; j < inputs; ++j) TRY(copy_input(requests[i], j, response));
    uint64_t end_ns = now_ns();
    TRY(TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, nullptr));
    TRY(TRITONBACKEND_ModelInstanceReportStatistics(instance, requests[i], true, start_ns, start_ns, end_ns, end_ns));
    TRY(TRITONBACKEND_RequestRelease(requests[i], RELEASE_ALL));
  }
  uint64_t end_ns = now_ns();
  return TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, count, start_ns, start_ns, end_ns, end_ns);
}
