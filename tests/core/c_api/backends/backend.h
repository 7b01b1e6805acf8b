// What the test backends share: declarations of the API's functions that they call, and two helpers.
#pragma once

#include <chrono>
#include <cstring>

#include "../../../../llmbackend/core/c_api/native/api.h"

#define IMPORTED extern "C"
IMPORTED Error* TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code, const char*);
IMPORTED void TRITONSERVER_ErrorDelete(Error*);
IMPORTED const char* TRITONSERVER_ErrorMessage(Error*);
IMPORTED Error* TRITONSERVER_LogMessage(TRITONSERVER_LogLevel, const char*, int, const char*);
IMPORTED bool TRITONSERVER_LogIsEnabled(TRITONSERVER_LogLevel);
IMPORTED Error* TRITONSERVER_MessageSerializeToJson(TRITONSERVER_Message*, const char**, size_t*);
IMPORTED Error* TRITONSERVER_MessageNewFromSerializedJson(TRITONSERVER_Message**, const char*, size_t);
IMPORTED Error* TRITONSERVER_MessageDelete(TRITONSERVER_Message*);
IMPORTED TRITONSERVER_Parameter* TRITONSERVER_ParameterNew(const char*, TRITONSERVER_ParameterType, const void*);
IMPORTED void TRITONSERVER_ParameterDelete(TRITONSERVER_Parameter*);
IMPORTED Error* TRITONSERVER_MetricFamilyNew(TRITONSERVER_MetricFamily**, TRITONSERVER_MetricKind, const char*, const char*);
IMPORTED Error* TRITONSERVER_MetricFamilyDelete(TRITONSERVER_MetricFamily*);
IMPORTED Error* TRITONSERVER_MetricNew(TRITONSERVER_Metric**, TRITONSERVER_MetricFamily*, const TRITONSERVER_Parameter**, uint64_t);
IMPORTED Error* TRITONSERVER_MetricDelete(TRITONSERVER_Metric*);
IMPORTED Error* TRITONSERVER_MetricIncrement(TRITONSERVER_Metric*, double);
IMPORTED Error* TRITONSERVER_MetricSet(TRITONSERVER_Metric*, double);
IMPORTED Error* TRITONSERVER_MetricValue(TRITONSERVER_Metric*, double*);
IMPORTED Error* TRITONSERVER_InferenceRequestNew(TRITONSERVER_InferenceRequest**, TRITONSERVER_Server*, const char*, int64_t);
IMPORTED Error* TRITONSERVER_InferenceRequestDelete(TRITONSERVER_InferenceRequest*);
IMPORTED Error* TRITONSERVER_InferenceRequestAddInput(TRITONSERVER_InferenceRequest*, const char*, TRITONSERVER_DataType, const int64_t*, uint64_t);
IMPORTED Error* TRITONSERVER_InferenceRequestAppendInputData(TRITONSERVER_InferenceRequest*, const char*, const void*, size_t, TRITONSERVER_MemoryType, int64_t);
IMPORTED Error* TRITONSERVER_InferenceRequestSetReleaseCallback(TRITONSERVER_InferenceRequest*, RequestReleaseFn, void*);
IMPORTED Error* TRITONSERVER_InferenceRequestSetResponseCallback(TRITONSERVER_InferenceRequest*, TRITONSERVER_ResponseAllocator*, void*, ResponseCompleteFn, void*);
IMPORTED Error* TRITONSERVER_ResponseAllocatorNew(TRITONSERVER_ResponseAllocator**, AllocateFn, ReleaseBufferFn, StartFn);
IMPORTED Error* TRITONSERVER_ResponseAllocatorDelete(TRITONSERVER_ResponseAllocator*);
IMPORTED Error* TRITONSERVER_ServerInferAsync(TRITONSERVER_Server*, TRITONSERVER_InferenceRequest*, TRITONSERVER_InferenceTrace*);
IMPORTED Error* TRITONSERVER_InferenceResponseError(TRITONSERVER_InferenceResponse*);
IMPORTED Error* TRITONSERVER_InferenceResponseDelete(TRITONSERVER_InferenceResponse*);
IMPORTED Error* TRITONSERVER_InferenceResponseOutput(TRITONSERVER_InferenceResponse*, uint32_t, const char**, TRITONSERVER_DataType*, const int64_t**, uint64_t*, const void**, size_t*, TRITONSERVER_MemoryType*, int64_t*, void**);
IMPORTED Error* TRITONBACKEND_ApiVersion(uint32_t*, uint32_t*);
IMPORTED Error* TRITONBACKEND_BackendState(TRITONBACKEND_Backend*, void**);
IMPORTED Error* TRITONBACKEND_BackendSetState(TRITONBACKEND_Backend*, void*);
IMPORTED Error* TRITONBACKEND_BackendConfig(TRITONBACKEND_Backend*, TRITONSERVER_Message**);
IMPORTED Error* TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(TRITONBACKEND_BackendAttribute*, TRITONSERVER_InstanceGroupKind, uint64_t, const uint64_t*, uint64_t);
IMPORTED Error* TRITONBACKEND_ModelName(TRITONBACKEND_Model*, const char**);
IMPORTED Error* TRITONBACKEND_ModelState(TRITONBACKEND_Model*, void**);
IMPORTED Error* TRITONBACKEND_ModelSetState(TRITONBACKEND_Model*, void*);
IMPORTED Error* TRITONBACKEND_ModelServer(TRITONBACKEND_Model*, TRITONSERVER_Server**);
IMPORTED Error* TRITONBACKEND_ModelConfig(TRITONBACKEND_Model*, uint32_t, TRITONSERVER_Message**);
IMPORTED Error* TRITONBACKEND_ModelSetConfig(TRITONBACKEND_Model*, uint32_t, TRITONSERVER_Message*);
IMPORTED Error* TRITONBACKEND_ModelInstanceModel(TRITONBACKEND_ModelInstance*, TRITONBACKEND_Model**);
IMPORTED Error* TRITONBACKEND_ModelInstanceReportStatistics(TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request*, bool, uint64_t, uint64_t, uint64_t, uint64_t);
IMPORTED Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(TRITONBACKEND_ModelInstance*, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
IMPORTED Error* TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request*, uint32_t*);
IMPORTED Error* TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request*, uint32_t, TRITONBACKEND_Input**);
IMPORTED Error* TRITONBACKEND_RequestInput(TRITONBACKEND_Request*, const char*, TRITONBACKEND_Input**);
IMPORTED Error* TRITONBACKEND_RequestParameterCount(TRITONBACKEND_Request*, uint32_t*);
IMPORTED Error* TRITONBACKEND_RequestParameter(TRITONBACKEND_Request*, uint32_t, const char**, TRITONSERVER_ParameterType*, const void**);
IMPORTED Error* TRITONBACKEND_RequestIsCancelled(TRITONBACKEND_Request*, bool*);
IMPORTED Error* TRITONBACKEND_RequestFlags(TRITONBACKEND_Request*, uint32_t*);
IMPORTED Error* TRITONBACKEND_RequestRelease(TRITONBACKEND_Request*, uint32_t);
IMPORTED Error* TRITONBACKEND_InputProperties(TRITONBACKEND_Input*, const char**, TRITONSERVER_DataType*, const int64_t**, uint32_t*, uint64_t*, uint32_t*);
IMPORTED Error* TRITONBACKEND_InputBuffer(TRITONBACKEND_Input*, uint32_t, const void**, uint64_t*, TRITONSERVER_MemoryType*, int64_t*);
IMPORTED Error* TRITONBACKEND_OutputBuffer(TRITONBACKEND_Output*, void**, uint64_t, TRITONSERVER_MemoryType*, int64_t*);
IMPORTED Error* TRITONBACKEND_ResponseNew(TRITONBACKEND_Response**, TRITONBACKEND_Request*);
IMPORTED Error* TRITONBACKEND_ResponseNewFromFactory(TRITONBACKEND_Response**, TRITONBACKEND_ResponseFactory*);
IMPORTED Error* TRITONBACKEND_ResponseOutput(TRITONBACKEND_Response*, TRITONBACKEND_Output**, const char*, TRITONSERVER_DataType, const int64_t*, uint32_t);
IMPORTED Error* TRITONBACKEND_ResponseSetIntParameter(TRITONBACKEND_Response*, const char*, int64_t);
IMPORTED Error* TRITONBACKEND_ResponseSend(TRITONBACKEND_Response*, uint32_t, Error*);
IMPORTED Error* TRITONBACKEND_ResponseFactoryNew(TRITONBACKEND_ResponseFactory**, TRITONBACKEND_Request*);
IMPORTED Error* TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory*);
IMPORTED Error* TRITONBACKEND_ResponseFactoryIsCancelled(TRITONBACKEND_ResponseFactory*, bool*);
IMPORTED Error* TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory*, uint32_t);
IMPORTED Error* TRITONBACKEND_StateNew(TRITONBACKEND_State**, TRITONBACKEND_Request*, const char*, TRITONSERVER_DataType, const int64_t*, uint32_t);
IMPORTED Error* TRITONBACKEND_StateBuffer(TRITONBACKEND_State*, void**, uint64_t, TRITONSERVER_MemoryType*, int64_t*);
IMPORTED Error* TRITONBACKEND_StateUpdate(TRITONBACKEND_State*);

#define TRY(CALL) \
  if (Error* failed = (CALL)) return failed

inline uint64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// The bytes of an input.
inline Error* read_input(TRITONBACKEND_Input* input, const char** data, uint64_t* byte_size) {
  TRITONSERVER_MemoryType type = MEMORY_CPU;
  int64_t type_id = 0;
  return TRITONBACKEND_InputBuffer(input, 0, reinterpret_cast<const void**>(data), byte_size, &type, &type_id);
}

// Adds an output with these bytes to a response.
inline Error* add_output(TRITONBACKEND_Response* response, const char* name, TRITONSERVER_DataType datatype,
                         const int64_t* shape, uint32_t dims, const void* data, uint64_t byte_size) {
  TRITONBACKEND_Output* output;
  void* buffer;
  TRITONSERVER_MemoryType type = MEMORY_CPU;
  int64_t type_id = 0;
  TRY(TRITONBACKEND_ResponseOutput(response, &output, name, datatype, shape, dims));
  TRY(TRITONBACKEND_OutputBuffer(output, &buffer, byte_size, &type, &type_id));
  memcpy(buffer, data, byte_size);
  return nullptr;
}

// Adds input INPUTn, by index, as output OUTPUTn.
inline Error* copy_input(TRITONBACKEND_Request* request, uint32_t index, TRITONBACKEND_Response* response) {
  TRITONBACKEND_Input* input;
  const char *name, *data;
  TRITONSERVER_DataType datatype;
  const int64_t* shape;
  uint32_t dims, buffers;
  uint64_t byte_size;
  TRY(TRITONBACKEND_RequestInputByIndex(request, index, &input));
  TRY(TRITONBACKEND_InputProperties(input, &name, &datatype, &shape, &dims, &byte_size, &buffers));
  TRY(read_input(input, &data, &byte_size));
  char output[64] = "OUTPUT";
  strncat(output, name + strlen("INPUT"), sizeof output - sizeof "OUTPUT");
  return add_output(response, output, datatype, shape, dims, data, byte_size);
}
