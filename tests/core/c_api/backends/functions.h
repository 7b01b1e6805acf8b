// The API's functions that backend.h does not declare, and how a test backend shows what a call gave.
#pragma once

#include <memory>
#include <sstream>
#include <string>

#include "backend.h"

struct TRITONCACHE_CacheEntry;
struct TRITONBACKEND_ModelInstanceResponseStatistics;
using ResponseStatistics = TRITONBACKEND_ModelInstanceResponseStatistics;

// clang-format off
IMPORTED Error* TRITONBACKEND_BackendArtifacts(TRITONBACKEND_Backend*, TRITONBACKEND_ArtifactType*, const char**);
IMPORTED Error* TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading(TRITONBACKEND_BackendAttribute*, bool);
IMPORTED Error* TRITONBACKEND_BackendExecutionPolicy(TRITONBACKEND_Backend*, TRITONBACKEND_ExecutionPolicy*);
IMPORTED Error* TRITONBACKEND_BackendMemoryManager(TRITONBACKEND_Backend*, TRITONBACKEND_MemoryManager**);
IMPORTED Error* TRITONBACKEND_BackendName(TRITONBACKEND_Backend*, const char**);
IMPORTED Error* TRITONBACKEND_BackendSetExecutionPolicy(TRITONBACKEND_Backend*, TRITONBACKEND_ExecutionPolicy);
IMPORTED Error* TRITONBACKEND_MemoryManagerAllocate(TRITONBACKEND_MemoryManager*, void**, TRITONSERVER_MemoryType, int64_t, uint64_t);
IMPORTED Error* TRITONBACKEND_MemoryManagerFree(TRITONBACKEND_MemoryManager*, void*, TRITONSERVER_MemoryType, int64_t);
IMPORTED Error* TRITONBACKEND_ModelAutoCompleteConfig(TRITONBACKEND_Model*, bool*);
IMPORTED Error* TRITONBACKEND_ModelBackend(TRITONBACKEND_Model*, TRITONBACKEND_Backend**);
IMPORTED Error* TRITONBACKEND_ModelReportMemoryUsage(TRITONBACKEND_Model*, TRITONSERVER_BufferAttributes**, uint32_t);
IMPORTED Error* TRITONBACKEND_ModelRepository(TRITONBACKEND_Model*, TRITONBACKEND_ArtifactType*, const char**);
IMPORTED Error* TRITONBACKEND_ModelVersion(TRITONBACKEND_Model*, uint64_t*);
IMPORTED Error* TRITONBACKEND_ModelInstanceDeviceId(TRITONBACKEND_ModelInstance*, int32_t*);
IMPORTED Error* TRITONBACKEND_ModelInstanceHostPolicy(TRITONBACKEND_ModelInstance*, TRITONSERVER_Message**);
IMPORTED Error* TRITONBACKEND_ModelInstanceIsPassive(TRITONBACKEND_ModelInstance*, bool*);
IMPORTED Error* TRITONBACKEND_ModelInstanceKind(TRITONBACKEND_ModelInstance*, TRITONSERVER_InstanceGroupKind*);
IMPORTED Error* TRITONBACKEND_ModelInstanceName(TRITONBACKEND_ModelInstance*, const char**);
IMPORTED Error* TRITONBACKEND_ModelInstanceProfileCount(TRITONBACKEND_ModelInstance*, uint32_t*);
IMPORTED Error* TRITONBACKEND_ModelInstanceProfileName(TRITONBACKEND_ModelInstance*, uint32_t, const char**);
IMPORTED Error* TRITONBACKEND_ModelInstanceReportMemoryUsage(TRITONBACKEND_ModelInstance*, TRITONSERVER_BufferAttributes**, uint32_t);
IMPORTED Error* TRITONBACKEND_ModelInstanceSecondaryDeviceCount(TRITONBACKEND_ModelInstance*, uint32_t*);
IMPORTED Error* TRITONBACKEND_ModelInstanceSecondaryDeviceProperties(TRITONBACKEND_ModelInstance*, uint32_t, const char**, int64_t*);
IMPORTED Error* TRITONBACKEND_ModelInstanceSetState(TRITONBACKEND_ModelInstance*, void*);
IMPORTED Error* TRITONBACKEND_ModelInstanceState(TRITONBACKEND_ModelInstance*, void**);
IMPORTED Error* TRITONBACKEND_ModelInstanceReportResponseStatistics(ResponseStatistics*);
IMPORTED Error* TRITONBACKEND_ModelInstanceResponseStatisticsNew(ResponseStatistics**);
IMPORTED Error* TRITONBACKEND_ModelInstanceResponseStatisticsDelete(ResponseStatistics*);
IMPORTED Error* TRITONBACKEND_ModelInstanceResponseStatisticsSetModelInstance(ResponseStatistics*, TRITONBACKEND_ModelInstance*);
IMPORTED Error* TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseFactory(ResponseStatistics*, TRITONBACKEND_ResponseFactory*);
IMPORTED Error* TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseStart(ResponseStatistics*, uint64_t);
IMPORTED Error* TRITONBACKEND_ModelInstanceResponseStatisticsSetComputeOutputStart(ResponseStatistics*, uint64_t);
IMPORTED Error* TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseEnd(ResponseStatistics*, uint64_t);
IMPORTED Error* TRITONBACKEND_ModelInstanceResponseStatisticsSetError(ResponseStatistics*, Error*);
IMPORTED Error* TRITONBACKEND_RequestCorrelationId(TRITONBACKEND_Request*, uint64_t*);
IMPORTED Error* TRITONBACKEND_RequestCorrelationIdString(TRITONBACKEND_Request*, const char**);
IMPORTED Error* TRITONBACKEND_RequestId(TRITONBACKEND_Request*, const char**);
IMPORTED Error* TRITONBACKEND_RequestInputName(TRITONBACKEND_Request*, uint32_t, const char**);
IMPORTED Error* TRITONBACKEND_RequestOutputBufferProperties(TRITONBACKEND_Request*, const char*, size_t*, TRITONSERVER_MemoryType*, int64_t*);
IMPORTED Error* TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request*, uint32_t*);
IMPORTED Error* TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request*, uint32_t, const char**);
IMPORTED Error* TRITONBACKEND_RequestTrace(TRITONBACKEND_Request*, TRITONSERVER_InferenceTrace**);
IMPORTED Error* TRITONBACKEND_InferenceRequestTimeoutMicroseconds(TRITONBACKEND_Request*, uint64_t*);
IMPORTED Error* TRITONBACKEND_InputBufferAttributes(TRITONBACKEND_Input*, uint32_t, const void**, TRITONSERVER_BufferAttributes**);
IMPORTED Error* TRITONBACKEND_InputBufferForHostPolicy(TRITONBACKEND_Input*, const char*, uint32_t, const void**, uint64_t*, TRITONSERVER_MemoryType*, int64_t*);
IMPORTED Error* TRITONBACKEND_InputPropertiesForHostPolicy(TRITONBACKEND_Input*, const char*, const char**, TRITONSERVER_DataType*, const int64_t**, uint32_t*, uint64_t*, uint32_t*);
IMPORTED Error* TRITONBACKEND_OutputBufferAttributes(TRITONBACKEND_Output*, TRITONSERVER_BufferAttributes**);
IMPORTED Error* TRITONBACKEND_StateBufferAttributes(TRITONBACKEND_State*, TRITONSERVER_BufferAttributes**);
IMPORTED Error* TRITONBACKEND_InferenceResponseOutput(TRITONBACKEND_Response*, uint32_t, const char**, TRITONSERVER_DataType*, const int64_t**, uint64_t*);
IMPORTED Error* TRITONBACKEND_InferenceResponseOutputByName(TRITONBACKEND_Response*, const char*, TRITONSERVER_DataType*, const int64_t**, uint64_t*);
IMPORTED Error* TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response*);
IMPORTED Error* TRITONBACKEND_ResponseSetBoolParameter(TRITONBACKEND_Response*, const char*, bool);
IMPORTED Error* TRITONBACKEND_ResponseSetDoubleParameter(TRITONBACKEND_Response*, const char*, double);
IMPORTED Error* TRITONBACKEND_ResponseSetStringParameter(TRITONBACKEND_Response*, const char*, const char*);
IMPORTED Error* TRITONCACHE_ApiVersion(uint32_t*, uint32_t*);
IMPORTED Error* TRITONCACHE_CacheEntryNew(TRITONCACHE_CacheEntry**);
IMPORTED Error* TRITONCACHE_CacheEntryDelete(TRITONCACHE_CacheEntry*);
IMPORTED Error* TRITONCACHE_CacheEntryBufferCount(TRITONCACHE_CacheEntry*, size_t*);
IMPORTED Error* TRITONCACHE_CacheEntryAddBuffer(TRITONCACHE_CacheEntry*, void*, TRITONSERVER_BufferAttributes*);
IMPORTED Error* TRITONCACHE_CacheEntryGetBuffer(TRITONCACHE_CacheEntry*, size_t, void**, TRITONSERVER_BufferAttributes*);
IMPORTED Error* TRITONCACHE_CacheEntrySetBuffer(TRITONCACHE_CacheEntry*, size_t, void*, TRITONSERVER_BufferAttributes*);
IMPORTED Error* TRITONSERVER_ApiVersion(uint32_t*, uint32_t*);
IMPORTED Error* TRITONSERVER_BufferAttributesNew(TRITONSERVER_BufferAttributes**);
IMPORTED Error* TRITONSERVER_BufferAttributesDelete(TRITONSERVER_BufferAttributes*);
IMPORTED Error* TRITONSERVER_BufferAttributesByteSize(TRITONSERVER_BufferAttributes*, size_t*);
IMPORTED Error* TRITONSERVER_BufferAttributesSetByteSize(TRITONSERVER_BufferAttributes*, size_t);
IMPORTED Error* TRITONSERVER_BufferAttributesMemoryType(TRITONSERVER_BufferAttributes*, TRITONSERVER_MemoryType*);
IMPORTED Error* TRITONSERVER_BufferAttributesSetMemoryType(TRITONSERVER_BufferAttributes*, TRITONSERVER_MemoryType);
IMPORTED Error* TRITONSERVER_BufferAttributesMemoryTypeId(TRITONSERVER_BufferAttributes*, int64_t*);
IMPORTED Error* TRITONSERVER_BufferAttributesSetMemoryTypeId(TRITONSERVER_BufferAttributes*, int64_t);
IMPORTED Error* TRITONSERVER_BufferAttributesCudaIpcHandle(TRITONSERVER_BufferAttributes*, void**);
IMPORTED Error* TRITONSERVER_BufferAttributesSetCudaIpcHandle(TRITONSERVER_BufferAttributes*, void*);
IMPORTED uint32_t TRITONSERVER_DataTypeByteSize(TRITONSERVER_DataType);
IMPORTED const char* TRITONSERVER_DataTypeString(TRITONSERVER_DataType);
IMPORTED TRITONSERVER_DataType TRITONSERVER_StringToDataType(const char*);
IMPORTED TRITONSERVER_Error_Code TRITONSERVER_ErrorCode(Error*);
IMPORTED const char* TRITONSERVER_ErrorCodeString(Error*);
IMPORTED const char* TRITONSERVER_InstanceGroupKindString(TRITONSERVER_InstanceGroupKind);
IMPORTED const char* TRITONSERVER_MemoryTypeString(TRITONSERVER_MemoryType);
IMPORTED const char* TRITONSERVER_ParameterTypeString(TRITONSERVER_ParameterType);
IMPORTED TRITONSERVER_Parameter* TRITONSERVER_ParameterBytesNew(const char*, const void*, uint64_t);
IMPORTED Error* TRITONSERVER_GetMetricFamilyKind(TRITONSERVER_MetricFamily*, TRITONSERVER_MetricKind*);
IMPORTED Error* TRITONSERVER_GetMetricKind(TRITONSERVER_Metric*, TRITONSERVER_MetricKind*);
IMPORTED Error* TRITONSERVER_MetricArgsNew(TRITONSERVER_MetricArgs**);
IMPORTED Error* TRITONSERVER_MetricArgsSetHistogram(TRITONSERVER_MetricArgs*, const double*, uint64_t);
IMPORTED Error* TRITONSERVER_MetricArgsDelete(TRITONSERVER_MetricArgs*);
IMPORTED Error* TRITONSERVER_MetricNewWithArgs(TRITONSERVER_Metric**, TRITONSERVER_MetricFamily*, const TRITONSERVER_Parameter**, uint64_t, const TRITONSERVER_MetricArgs*);
IMPORTED Error* TRITONSERVER_MetricObserve(TRITONSERVER_Metric*, double);
IMPORTED Error* TRITONSERVER_MetricSet(TRITONSERVER_Metric*, double);
IMPORTED Error* TRITONSERVER_InferenceTraceContext(TRITONSERVER_InferenceTrace*, const char**);
IMPORTED Error* TRITONSERVER_InferenceTraceDelete(TRITONSERVER_InferenceTrace*);
IMPORTED Error* TRITONSERVER_InferenceTraceSetContext(TRITONSERVER_InferenceTrace*, const char*);
IMPORTED Error* TRITONSERVER_InferenceTraceSpawnChildTrace(TRITONSERVER_InferenceTrace*, TRITONSERVER_InferenceTrace**);
IMPORTED const char* TRITONSERVER_InferenceTraceActivityString(int);
IMPORTED const char* TRITONSERVER_InferenceTraceLevelString(int);
IMPORTED Error* TRITONSERVER_InferenceRequestAddRequestedOutput(TRITONSERVER_InferenceRequest*, const char*);
IMPORTED Error* TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes(TRITONSERVER_InferenceRequest*, const char*, const void*, TRITONSERVER_BufferAttributes*);
IMPORTED Error* TRITONSERVER_InferenceRequestAppendInputDataWithHostPolicy(TRITONSERVER_InferenceRequest*, const char*, const void*, size_t, TRITONSERVER_MemoryType, int64_t, const char*);
IMPORTED Error* TRITONSERVER_InferenceRequestCancel(TRITONSERVER_InferenceRequest*);
IMPORTED Error* TRITONSERVER_InferenceRequestIsCancelled(TRITONSERVER_InferenceRequest*, bool*);
IMPORTED Error* TRITONSERVER_InferenceRequestCorrelationId(TRITONSERVER_InferenceRequest*, uint64_t*);
IMPORTED Error* TRITONSERVER_InferenceRequestSetCorrelationId(TRITONSERVER_InferenceRequest*, uint64_t);
IMPORTED Error* TRITONSERVER_InferenceRequestCorrelationIdString(TRITONSERVER_InferenceRequest*, const char**);
IMPORTED Error* TRITONSERVER_InferenceRequestSetCorrelationIdString(TRITONSERVER_InferenceRequest*, const char*);
IMPORTED Error* TRITONSERVER_InferenceRequestFlags(TRITONSERVER_InferenceRequest*, uint32_t*);
IMPORTED Error* TRITONSERVER_InferenceRequestSetFlags(TRITONSERVER_InferenceRequest*, uint32_t);
IMPORTED Error* TRITONSERVER_InferenceRequestId(TRITONSERVER_InferenceRequest*, const char**);
IMPORTED Error* TRITONSERVER_InferenceRequestSetId(TRITONSERVER_InferenceRequest*, const char*);
IMPORTED Error* TRITONSERVER_InferenceRequestPriority(TRITONSERVER_InferenceRequest*, uint32_t*);
IMPORTED Error* TRITONSERVER_InferenceRequestSetPriority(TRITONSERVER_InferenceRequest*, uint32_t);
IMPORTED Error* TRITONSERVER_InferenceRequestPriorityUInt64(TRITONSERVER_InferenceRequest*, uint64_t*);
IMPORTED Error* TRITONSERVER_InferenceRequestSetPriorityUInt64(TRITONSERVER_InferenceRequest*, uint64_t);
IMPORTED Error* TRITONSERVER_InferenceRequestTimeoutMicroseconds(TRITONSERVER_InferenceRequest*, uint64_t*);
IMPORTED Error* TRITONSERVER_InferenceRequestSetTimeoutMicroseconds(TRITONSERVER_InferenceRequest*, uint64_t);
IMPORTED Error* TRITONSERVER_InferenceRequestRemoveAllInputData(TRITONSERVER_InferenceRequest*, const char*);
IMPORTED Error* TRITONSERVER_InferenceRequestRemoveAllInputs(TRITONSERVER_InferenceRequest*);
IMPORTED Error* TRITONSERVER_InferenceRequestRemoveAllRequestedOutputs(TRITONSERVER_InferenceRequest*);
IMPORTED Error* TRITONSERVER_InferenceRequestRemoveInput(TRITONSERVER_InferenceRequest*, const char*);
IMPORTED Error* TRITONSERVER_InferenceRequestRemoveRequestedOutput(TRITONSERVER_InferenceRequest*, const char*);
IMPORTED Error* TRITONSERVER_InferenceRequestSetBoolParameter(TRITONSERVER_InferenceRequest*, const char*, bool);
IMPORTED Error* TRITONSERVER_InferenceRequestSetDoubleParameter(TRITONSERVER_InferenceRequest*, const char*, double);
IMPORTED Error* TRITONSERVER_InferenceRequestSetIntParameter(TRITONSERVER_InferenceRequest*, const char*, int64_t);
IMPORTED Error* TRITONSERVER_InferenceRequestSetStringParameter(TRITONSERVER_InferenceRequest*, const char*, const char*);
IMPORTED Error* TRITONSERVER_InferenceResponseId(TRITONSERVER_InferenceResponse*, const char**);
IMPORTED Error* TRITONSERVER_InferenceResponseModel(TRITONSERVER_InferenceResponse*, const char**, int64_t*);
IMPORTED Error* TRITONSERVER_InferenceResponseOutputClassificationLabel(TRITONSERVER_InferenceResponse*, uint32_t, size_t, const char**);
IMPORTED Error* TRITONSERVER_InferenceResponseOutputCount(TRITONSERVER_InferenceResponse*, uint32_t*);
IMPORTED Error* TRITONSERVER_InferenceResponseParameter(TRITONSERVER_InferenceResponse*, uint32_t, const char**, TRITONSERVER_ParameterType*, const void**);
IMPORTED Error* TRITONSERVER_InferenceResponseParameterCount(TRITONSERVER_InferenceResponse*, uint32_t*);
IMPORTED Error* TRITONSERVER_ResponseAllocatorSetBufferAttributesFunction(TRITONSERVER_ResponseAllocator*, BufferAttributesFn);
IMPORTED Error* TRITONSERVER_ResponseAllocatorSetQueryFunction(TRITONSERVER_ResponseAllocator*, QueryFn);
IMPORTED Error* TRITONSERVER_ServerIsLive(TRITONSERVER_Server*, bool*);
IMPORTED Error* TRITONSERVER_ServerLoadModel(TRITONSERVER_Server*, const char*);
IMPORTED Error* TRITONSERVER_ServerLoadModelWithParameters(TRITONSERVER_Server*, const char*, const TRITONSERVER_Parameter**, uint64_t);
IMPORTED Error* TRITONSERVER_ServerModelIsReady(TRITONSERVER_Server*, const char*, int64_t, bool*);
IMPORTED Error* TRITONSERVER_ServerModelTransactionProperties(TRITONSERVER_Server*, const char*, int64_t, uint32_t*, void**);
IMPORTED Error* TRITONSERVER_ServerUnloadModel(TRITONSERVER_Server*, const char*);
IMPORTED Error* TRITONSERVER_ServerUnloadModelAndDependents(TRITONSERVER_Server*, const char*);
// clang-format on

// A list of lines "label: what it gave", which a test compares.
class Report {
 public:
  void call(const std::string& label, Error* error) { line(label, shown(error)); }

  template <typename T>
  void value(const std::string& label, const T& value) {
    std::ostringstream text;
    text << std::boolalpha << value;
    line(label, text.str());
  }

  const std::string& text() const { return text_; }

  // "OK", or "<code>: <message>" of an error, which is deleted.
  static std::string shown(Error* error) {
    if (!error) return "OK";
    std::string text = std::string(TRITONSERVER_ErrorCodeString(error)) + ": " + TRITONSERVER_ErrorMessage(error);
    TRITONSERVER_ErrorDelete(error);
    return text;
  }

 private:
  void line(const std::string& label, const std::string& result) { text_ += label + "=" + result + "\n"; }

  std::string text_;
};

// The value that a call has set, or its error.
#define VALUE(LABEL, CALL, SHOWN)           \
  do {                                      \
    if (Error* value_error = (CALL))        \
      report.call(LABEL, value_error);      \
    else                                    \
      report.value(LABEL, SHOWN);           \
  } while (false)

// A text as one element of a BYTES tensor.
inline std::string serialized(const std::string& text) {
  uint32_t length = text.size();
  return std::string(reinterpret_cast<char*>(&length), sizeof length) + text;
}

inline Error* add_text(TRITONBACKEND_Response* response, const std::string& text) {
  const int64_t shape[] = {1};
  std::string data = serialized(text);
  return add_output(response, "OUTPUT0", TYPE_BYTES, shape, 1, data.data(), data.size());
}

// The text in INPUT0.
inline Error* command_of(TRITONBACKEND_Request* request, std::string* command) {
  TRITONBACKEND_Input* input;
  const char* data;
  uint64_t byte_size;
  TRY(TRITONBACKEND_RequestInput(request, "INPUT0", &input));
  TRY(read_input(input, &data, &byte_size));
  command->assign(data + 4, byte_size - 4);
  return nullptr;
}

inline Error* answer_with_text(TRITONBACKEND_Request* request, const std::string& text) {
  TRITONBACKEND_Response* response;
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  TRY(add_text(response, text));
  TRY(TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, nullptr));
  return TRITONBACKEND_RequestRelease(request, RELEASE_ALL);
}
