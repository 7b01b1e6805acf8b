// The types of Triton's C API for backends, redeclared from its published headers: TRITONBACKEND API 1.19,
// TRITONSERVER API 1.34. Names and numbers are the ABI; tests/core/c_api compares the functions with a list of names.
#pragma once

#include <cstddef>
#include <cstdint>

#define EXPORTED extern "C" __attribute__((visibility("default")))

constexpr uint32_t BACKEND_API_MAJOR = 1, BACKEND_API_MINOR = 19;
constexpr uint32_t SERVER_API_MAJOR = 1, SERVER_API_MINOR = 34;

struct TRITONSERVER_BufferAttributes;
struct TRITONSERVER_Error;
struct TRITONSERVER_InferenceRequest;
struct TRITONSERVER_InferenceResponse;
struct TRITONSERVER_InferenceTrace;
struct TRITONSERVER_Message;
struct TRITONSERVER_Metric;
struct TRITONSERVER_MetricArgs;
struct TRITONSERVER_MetricFamily;
struct TRITONSERVER_Parameter;
struct TRITONSERVER_ResponseAllocator;
struct TRITONSERVER_Server;
struct TRITONBACKEND_Backend;
struct TRITONBACKEND_BackendAttribute;
struct TRITONBACKEND_Batcher;
struct TRITONBACKEND_Input;
struct TRITONBACKEND_MemoryManager;
struct TRITONBACKEND_Model;
struct TRITONBACKEND_ModelInstance;
struct TRITONBACKEND_Output;
struct TRITONBACKEND_Request;
struct TRITONBACKEND_Response;
struct TRITONBACKEND_ResponseFactory;
struct TRITONBACKEND_State;

using Error = TRITONSERVER_Error;

enum TRITONSERVER_DataType {
  TYPE_INVALID, TYPE_BOOL, TYPE_UINT8, TYPE_UINT16, TYPE_UINT32, TYPE_UINT64, TYPE_INT8, TYPE_INT16, TYPE_INT32,
  TYPE_INT64, TYPE_FP16, TYPE_FP32, TYPE_FP64, TYPE_BYTES, TYPE_BF16,
};
enum TRITONSERVER_MemoryType { MEMORY_CPU, MEMORY_CPU_PINNED, MEMORY_GPU };
enum TRITONSERVER_ParameterType {
  PARAMETER_STRING, PARAMETER_INT, PARAMETER_BOOL, PARAMETER_DOUBLE, PARAMETER_BYTES,
};
enum TRITONSERVER_InstanceGroupKind { KIND_AUTO, KIND_CPU, KIND_GPU, KIND_MODEL };
enum TRITONSERVER_LogLevel { LOG_INFO, LOG_WARN, LOG_ERROR, LOG_VERBOSE };
enum TRITONSERVER_Error_Code {
  ERROR_UNKNOWN, ERROR_INTERNAL, ERROR_NOT_FOUND, ERROR_INVALID_ARG, ERROR_UNAVAILABLE, ERROR_UNSUPPORTED,
  ERROR_ALREADY_EXISTS, ERROR_CANCELLED,
};
enum TRITONSERVER_MetricKind { METRIC_COUNTER, METRIC_GAUGE, METRIC_HISTOGRAM };
enum TRITONBACKEND_ExecutionPolicy { EXECUTION_BLOCKING, EXECUTION_DEVICE_BLOCKING };
enum TRITONBACKEND_ArtifactType { ARTIFACT_FILESYSTEM };

constexpr uint32_t RELEASE_ALL = 1, RELEASE_RESCHEDULE = 2;
constexpr uint32_t RESPONSE_FINAL = 1;
constexpr uint32_t TXN_ONE_TO_ONE = 1, TXN_DECOUPLED = 2;
constexpr uint32_t BATCH_UNKNOWN = 1, BATCH_FIRST_DIM = 2;

using AllocateFn = Error* (*)(TRITONSERVER_ResponseAllocator*, const char* name, size_t byte_size,
                              TRITONSERVER_MemoryType, int64_t memory_type_id, void* userp, void** buffer,
                              void** buffer_userp, TRITONSERVER_MemoryType* actual, int64_t* actual_id);
using ReleaseBufferFn = Error* (*)(TRITONSERVER_ResponseAllocator*, void* buffer, void* buffer_userp, size_t byte_size,
                                   TRITONSERVER_MemoryType, int64_t memory_type_id);
using StartFn = Error* (*)(TRITONSERVER_ResponseAllocator*, void* userp);
using QueryFn = Error* (*)(TRITONSERVER_ResponseAllocator*, void* userp, const char* name, size_t* byte_size,
                           TRITONSERVER_MemoryType*, int64_t* memory_type_id);
using BufferAttributesFn = Error* (*)(TRITONSERVER_ResponseAllocator*, const char* name,
                                      TRITONSERVER_BufferAttributes*, void* userp, void* buffer_userp);
using RequestReleaseFn = void (*)(TRITONSERVER_InferenceRequest*, uint32_t flags, void* userp);
using ResponseCompleteFn = void (*)(TRITONSERVER_InferenceResponse*, uint32_t flags, void* userp);
