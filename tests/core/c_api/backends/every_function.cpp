// Calls the API's functions with right and wrong arguments, and answers with what each gave. Its input, one string,
// names the group of functions. Those of BLS are in bls.cpp, those of metrics in metrics.cpp.
#include <vector>

#include "functions.h"

namespace {

struct Subject {
  TRITONBACKEND_Backend* backend;
  TRITONBACKEND_Model* model;
  TRITONBACKEND_ModelInstance* instance;
  TRITONBACKEND_Request* request;
};

std::string json_of(TRITONSERVER_Message* message) {
  const char* json = nullptr;
  size_t size = 0;
  if (Error* error = TRITONSERVER_MessageSerializeToJson(message, &json, &size)) return Report::shown(error);
  return std::string(json, size);
}

// What `name` gives for 0 to count - 1.
template <typename E>
std::string names(const char* (*name)(E), int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += name(static_cast<E>(i)) + std::string(" ");
  return text;
}

void values(const Subject&, Report& report) {
  uint32_t major = 0, minor = 0;
  VALUE("ApiVersion", TRITONSERVER_ApiVersion(&major, &minor), major * 1000 + minor);
  VALUE("backend ApiVersion", TRITONBACKEND_ApiVersion(&major, &minor), major * 1000 + minor);
  VALUE("cache ApiVersion", TRITONCACHE_ApiVersion(&major, &minor), major * 1000 + minor);
  std::string types, sizes, back;
  for (int type = TYPE_INVALID; type <= TYPE_BF16 + 1; ++type) {
    auto datatype = static_cast<TRITONSERVER_DataType>(type);
    const char* name = TRITONSERVER_DataTypeString(datatype);
    types += std::string(name) + " ";
    sizes += std::to_string(TRITONSERVER_DataTypeByteSize(datatype)) + " ";
    back += std::to_string(TRITONSERVER_StringToDataType(name)) + " ";
  }
  report.value("DataTypeString", types);
  report.value("DataTypeByteSize", sizes);
  report.value("StringToDataType", back);
  std::string codes, levels, activities;
  for (int i = 0; i < 9; ++i) {
    Error* error = TRITONSERVER_ErrorNew(static_cast<TRITONSERVER_Error_Code>(i), nullptr);
    codes += std::to_string(TRITONSERVER_ErrorCode(error)) + TRITONSERVER_ErrorMessage(error) + " " +
             TRITONSERVER_ErrorCodeString(error) + ", ";
    TRITONSERVER_ErrorDelete(error);
  }
  for (int level : {0, 1, 2, 4, 8, 3}) levels += TRITONSERVER_InferenceTraceLevelString(level) + std::string(" ");
  for (int i : {0, 1, 6, 9, 10, -1}) activities += TRITONSERVER_InferenceTraceActivityString(i) + std::string(" ");
  report.value("MemoryTypeString", names<TRITONSERVER_MemoryType>(TRITONSERVER_MemoryTypeString, 4));
  report.value("ParameterTypeString", names<TRITONSERVER_ParameterType>(TRITONSERVER_ParameterTypeString, 6));
  report.value("InstanceGroupKindString",
               names<TRITONSERVER_InstanceGroupKind>(TRITONSERVER_InstanceGroupKindString, 5));
  report.value("ErrorCodeString", codes);
  report.value("InferenceTraceLevelString", levels);
  report.value("InferenceTraceActivityString", activities);
  report.value("LogIsEnabled", TRITONSERVER_LogIsEnabled(LOG_ERROR));
  report.call("LogMessage at level 4", TRITONSERVER_LogMessage(static_cast<TRITONSERVER_LogLevel>(4), "f", 1, "no"));
  report.call("LogMessage not UTF-8", TRITONSERVER_LogMessage(LOG_INFO, "f.cpp", 1, "caf\xe9"));
  TRITONSERVER_Message* message;
  report.call("MessageNew", TRITONSERVER_MessageNewFromSerializedJson(&message, "{\"a\":1}...", 7));
  report.value("MessageSerializeToJson", json_of(message));
  report.call("MessageDelete", TRITONSERVER_MessageDelete(message));
}

void attributes(const Subject&, Report& report) {
  TRITONSERVER_BufferAttributes* attributes;
  TRITONSERVER_MemoryType type;
  int64_t id;
  size_t size;
  void* handle;
  report.call("New", TRITONSERVER_BufferAttributesNew(&attributes));
  VALUE("MemoryType of a new one", TRITONSERVER_BufferAttributesMemoryType(attributes, &type), type);
  report.call("SetMemoryType", TRITONSERVER_BufferAttributesSetMemoryType(attributes, MEMORY_GPU));
  VALUE("MemoryType", TRITONSERVER_BufferAttributesMemoryType(attributes, &type), type);
  report.call("SetMemoryTypeId", TRITONSERVER_BufferAttributesSetMemoryTypeId(attributes, 3));
  VALUE("MemoryTypeId", TRITONSERVER_BufferAttributesMemoryTypeId(attributes, &id), id);
  report.call("SetByteSize", TRITONSERVER_BufferAttributesSetByteSize(attributes, 40));
  VALUE("ByteSize", TRITONSERVER_BufferAttributesByteSize(attributes, &size), size);
  report.call("SetCudaIpcHandle", TRITONSERVER_BufferAttributesSetCudaIpcHandle(attributes, &size));
  VALUE("CudaIpcHandle", TRITONSERVER_BufferAttributesCudaIpcHandle(attributes, &handle), handle == &size);
  TRITONCACHE_CacheEntry* entry;
  size_t count;
  report.call("CacheEntryNew", TRITONCACHE_CacheEntryNew(&entry));
  report.call("CacheEntryAddBuffer of a GPU", TRITONCACHE_CacheEntryAddBuffer(entry, &size, attributes));
  TRITONSERVER_BufferAttributesSetMemoryType(attributes, MEMORY_CPU);
  report.call("CacheEntryAddBuffer", TRITONCACHE_CacheEntryAddBuffer(entry, &size, attributes));
  VALUE("CacheEntryBufferCount", TRITONCACHE_CacheEntryBufferCount(entry, &count), count);
  VALUE("CacheEntryGetBuffer", TRITONCACHE_CacheEntryGetBuffer(entry, 0, &handle, attributes), handle == &size);
  report.call("CacheEntryGetBuffer 1", TRITONCACHE_CacheEntryGetBuffer(entry, 1, &handle, attributes));
  report.call("CacheEntrySetBuffer", TRITONCACHE_CacheEntrySetBuffer(entry, 0, &count, nullptr));
  report.call("CacheEntrySetBuffer 1", TRITONCACHE_CacheEntrySetBuffer(entry, 1, &count, nullptr));
  report.call("CacheEntryDelete", TRITONCACHE_CacheEntryDelete(entry));
  report.call("Delete", TRITONSERVER_BufferAttributesDelete(attributes));
}

void backend(const Subject& subject, Report& report) {
  const char *name, *location;
  TRITONSERVER_Message* config;
  TRITONBACKEND_ExecutionPolicy policy;
  TRITONBACKEND_ArtifactType artifacts;
  TRITONBACKEND_MemoryManager* manager;
  void *state, *memory = nullptr;
  VALUE("Name", TRITONBACKEND_BackendName(subject.backend, &name), name);
  report.call("Config", TRITONBACKEND_BackendConfig(subject.backend, &config));
  report.value("its JSON", json_of(config));
  VALUE("ExecutionPolicy", TRITONBACKEND_BackendExecutionPolicy(subject.backend, &policy), policy);
  VALUE("Artifacts", TRITONBACKEND_BackendArtifacts(subject.backend, &artifacts, &location),
               artifacts == ARTIFACT_FILESYSTEM ? location : "");
  VALUE("State", TRITONBACKEND_BackendState(subject.backend, &state), *static_cast<std::string*>(state));
  report.call("MemoryManager", TRITONBACKEND_BackendMemoryManager(subject.backend, &manager));
  report.call("Allocate", TRITONBACKEND_MemoryManagerAllocate(manager, &memory, MEMORY_CPU, 0, 1 << 20));
  if (memory) memset(memory, 1, 1 << 20);
  report.call("Free as pinned", TRITONBACKEND_MemoryManagerFree(manager, memory, MEMORY_CPU_PINNED, 0));
  report.call("Free", TRITONBACKEND_MemoryManagerFree(manager, memory, MEMORY_CPU, 0));
  report.call("Allocate nothing", TRITONBACKEND_MemoryManagerAllocate(manager, &memory, MEMORY_CPU, 0, 0));
  report.call("Free nothing", TRITONBACKEND_MemoryManagerFree(manager, memory, MEMORY_CPU, 0));
  report.call("Allocate pinned", TRITONBACKEND_MemoryManagerAllocate(manager, &memory, MEMORY_CPU_PINNED, 0, 8));
  report.call("Allocate of a GPU", TRITONBACKEND_MemoryManagerAllocate(manager, &memory, MEMORY_GPU, 0, 8));
  report.call("Allocate too much", TRITONBACKEND_MemoryManagerAllocate(manager, &memory, MEMORY_CPU, 0, 1ull << 60));
}

// Memory of each kind, as ReportMemoryUsage takes it.
struct Usage {
  TRITONSERVER_BufferAttributes* parts[2];
  Usage() {
    for (int i = 0; i < 2; ++i) {
      TRITONSERVER_BufferAttributesNew(&parts[i]);
      TRITONSERVER_BufferAttributesSetMemoryType(parts[i], i ? MEMORY_GPU : MEMORY_CPU);
      TRITONSERVER_BufferAttributesSetByteSize(parts[i], 1000 + i);
    }
  }
  ~Usage() {
    for (auto* part : parts) TRITONSERVER_BufferAttributesDelete(part);
  }
};

void model(const Subject& subject, Report& report) {
  const char *name, *location;
  uint64_t version;
  bool completes;
  TRITONBACKEND_ArtifactType artifacts;
  TRITONSERVER_Message *config = nullptr, *other = nullptr;
  TRITONSERVER_Server* server = nullptr;
  TRITONBACKEND_Backend* owner;
  void* state;
  VALUE("Name", TRITONBACKEND_ModelName(subject.model, &name), name);
  VALUE("Version", TRITONBACKEND_ModelVersion(subject.model, &version), version);
  VALUE("Repository", TRITONBACKEND_ModelRepository(subject.model, &artifacts, &location),
               artifacts == ARTIFACT_FILESYSTEM ? location : "");
  VALUE("AutoCompleteConfig", TRITONBACKEND_ModelAutoCompleteConfig(subject.model, &completes), completes);
  VALUE("Backend", TRITONBACKEND_ModelBackend(subject.model, &owner), owner == subject.backend);
  VALUE("Server", TRITONBACKEND_ModelServer(subject.model, &server), server != nullptr);
  VALUE("State", TRITONBACKEND_ModelState(subject.model, &state), state == nullptr);
  report.call("SetState", TRITONBACKEND_ModelSetState(subject.model, &version));
  VALUE("State that was set", TRITONBACKEND_ModelState(subject.model, &state), state == &version);
  report.call("SetState of none", TRITONBACKEND_ModelSetState(subject.model, nullptr));
  VALUE("Config", TRITONBACKEND_ModelConfig(subject.model, 1, &config), json_of(config).substr(0, 12));
  report.call("Config 2", TRITONBACKEND_ModelConfig(subject.model, 2, &other));
  report.call("SetConfig after Initialize", TRITONBACKEND_ModelSetConfig(subject.model, 1, config));
  report.call("SetConfig 2", TRITONBACKEND_ModelSetConfig(subject.model, 2, config));
  TRITONSERVER_MessageNewFromSerializedJson(&other, "{]", 2);
  report.call("SetConfig of no JSON", TRITONBACKEND_ModelSetConfig(subject.model, 1, other));
  TRITONSERVER_MessageDelete(config);
  TRITONSERVER_MessageDelete(other);
  Usage usage;
  report.call("ReportMemoryUsage", TRITONBACKEND_ModelReportMemoryUsage(subject.model, usage.parts, 2));
}

void instance(const Subject& subject, Report& report) {
  auto* instance = subject.instance;
  const char* name;
  TRITONSERVER_InstanceGroupKind kind;
  int32_t device;
  int64_t id;
  bool is_passive;
  uint32_t count;
  void* state;
  TRITONSERVER_Message* policy = nullptr;
  TRITONBACKEND_Model* owner;
  VALUE("Name", TRITONBACKEND_ModelInstanceName(instance, &name), name);
  VALUE("Kind", TRITONBACKEND_ModelInstanceKind(instance, &kind), TRITONSERVER_InstanceGroupKindString(kind));
  VALUE("DeviceId", TRITONBACKEND_ModelInstanceDeviceId(instance, &device), device);
  VALUE("HostPolicy", TRITONBACKEND_ModelInstanceHostPolicy(instance, &policy), json_of(policy));
  VALUE("IsPassive", TRITONBACKEND_ModelInstanceIsPassive(instance, &is_passive), is_passive);
  VALUE("ProfileCount", TRITONBACKEND_ModelInstanceProfileCount(instance, &count), count);
  report.call("ProfileName 0", TRITONBACKEND_ModelInstanceProfileName(instance, 0, &name));
  VALUE("SecondaryDeviceCount", TRITONBACKEND_ModelInstanceSecondaryDeviceCount(instance, &count), count);
  report.call("SecondaryDeviceProperties 0",
              TRITONBACKEND_ModelInstanceSecondaryDeviceProperties(instance, 0, &name, &id));
  VALUE("Model", TRITONBACKEND_ModelInstanceModel(instance, &owner), owner == subject.model);
  VALUE("State", TRITONBACKEND_ModelInstanceState(instance, &state), state == nullptr);
  report.call("SetState", TRITONBACKEND_ModelInstanceSetState(instance, &count));
  VALUE("State that was set", TRITONBACKEND_ModelInstanceState(instance, &state), state == &count);
  report.call("SetState of none", TRITONBACKEND_ModelInstanceSetState(instance, nullptr));
  Usage usage;
  report.call("ReportMemoryUsage", TRITONBACKEND_ModelInstanceReportMemoryUsage(instance, usage.parts, 2));
  report.call("ReportBatchStatistics", TRITONBACKEND_ModelInstanceReportBatchStatistics(instance, 3, 10, 20, 30, 40));
  ResponseStatistics* statistics;
  report.call("ResponseStatisticsNew", TRITONBACKEND_ModelInstanceResponseStatisticsNew(&statistics));
  report.call("ReportResponseStatistics of nothing", TRITONBACKEND_ModelInstanceReportResponseStatistics(statistics));
  report.call("ResponseStatisticsDelete", TRITONBACKEND_ModelInstanceResponseStatisticsDelete(statistics));
}

std::string dims_of(const int64_t* shape, uint32_t dims) {
  std::string text;
  for (uint32_t i = 0; i < dims; ++i) text += std::to_string(shape[i]) + ",";
  return text;
}

void request(const Subject& subject, Report& report) {
  auto* request = subject.request;
  const char *text = nullptr, *value = nullptr;
  uint64_t number;
  uint32_t count;
  bool flag;
  TRITONSERVER_ParameterType type;
  const void* data;
  TRITONBACKEND_Input* input;
  TRITONSERVER_InferenceTrace* trace;
  TRITONBACKEND_State* state;
  const int64_t shape[] = {1};
  VALUE("Id", TRITONBACKEND_RequestId(request, &text), text);
  VALUE("CorrelationId", TRITONBACKEND_RequestCorrelationId(request, &number), number);
  VALUE("CorrelationIdString", TRITONBACKEND_RequestCorrelationIdString(request, &value), value ? value : "");
  VALUE("Flags", TRITONBACKEND_RequestFlags(request, &count), count);
  VALUE("Timeout", TRITONBACKEND_InferenceRequestTimeoutMicroseconds(request, &number), number);
  VALUE("IsCancelled", TRITONBACKEND_RequestIsCancelled(request, &flag), flag);
  VALUE("Trace", TRITONBACKEND_RequestTrace(request, &trace), trace == nullptr);
  VALUE("ParameterCount", TRITONBACKEND_RequestParameterCount(request, &count), count);
  report.call("Parameter 9", TRITONBACKEND_RequestParameter(request, 9, &text, &type, &data));
  VALUE("InputCount", TRITONBACKEND_RequestInputCount(request, &count), count);
  VALUE("InputName 0", TRITONBACKEND_RequestInputName(request, 0, &text), text);
  report.call("InputName 1", TRITONBACKEND_RequestInputName(request, 1, &text));
  report.call("InputByIndex 7", TRITONBACKEND_RequestInputByIndex(request, 7, &input));
  report.call("Input X", TRITONBACKEND_RequestInput(request, "X", &input));
  VALUE("OutputCount", TRITONBACKEND_RequestOutputCount(request, &count), count);
  VALUE("OutputName 0", TRITONBACKEND_RequestOutputName(request, 0, &text), text);
  report.call("OutputName 1", TRITONBACKEND_RequestOutputName(request, 1, &text));
  TRITONSERVER_MemoryType memory = MEMORY_GPU;
  int64_t id = 1;
  size_t size = 4;
  VALUE("OutputBufferProperties",
               TRITONBACKEND_RequestOutputBufferProperties(request, "OUTPUT0", &size, &memory, &id), memory);
  report.call("StateNew without states", TRITONBACKEND_StateNew(&state, request, "S", TYPE_FP32, shape, 1));
  report.call("Release with flags 0", TRITONBACKEND_RequestRelease(request, 0));
  report.call("Release with flags 4", TRITONBACKEND_RequestRelease(request, 4));
  report.call("Release to be rescheduled", TRITONBACKEND_RequestRelease(request, RELEASE_RESCHEDULE));
}

void input(const Subject& subject, Report& report) {
  TRITONBACKEND_Input* input;
  TRITONBACKEND_RequestInput(subject.request, "INPUT0", &input);
  const char* name;
  TRITONSERVER_DataType datatype;
  const int64_t* shape;
  uint32_t dims, buffers;
  uint64_t size;
  const void *buffer, *same;
  TRITONSERVER_MemoryType memory = MEMORY_GPU;
  int64_t id = 1;
  TRITONSERVER_BufferAttributes* attributes;
  VALUE("Properties", TRITONBACKEND_InputProperties(input, &name, &datatype, &shape, &dims, &size, &buffers),
               std::string(name) + " " + TRITONSERVER_DataTypeString(datatype) + " " + dims_of(shape, dims) + " " +
                   std::to_string(size) + " " + std::to_string(buffers));
  report.call("Properties of none",
              TRITONBACKEND_InputProperties(input, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr));
  VALUE("PropertiesForHostPolicy",
               TRITONBACKEND_InputPropertiesForHostPolicy(input, "cpu", nullptr, nullptr, nullptr, nullptr, &size,
                                                          nullptr),
               size);
  VALUE("Buffer", TRITONBACKEND_InputBuffer(input, 0, &buffer, &size, &memory, &id), size + memory + id);
  VALUE("BufferForHostPolicy",
               TRITONBACKEND_InputBufferForHostPolicy(input, "cpu", 0, &same, &size, &memory, &id), same == buffer);
  VALUE("BufferAttributes", TRITONBACKEND_InputBufferAttributes(input, 0, &same, &attributes), same == buffer);
  VALUE("their ByteSize", TRITONSERVER_BufferAttributesByteSize(attributes, &size), size);
  report.call("Buffer 1", TRITONBACKEND_InputBuffer(input, 1, &buffer, &size, &memory, &id));
  report.value("its size", buffer == nullptr && size == 0);
  report.call("BufferAttributes 1", TRITONBACKEND_InputBufferAttributes(input, 1, &buffer, &attributes));
}

void response(const Subject& subject, Report& report) {
  TRITONBACKEND_Response* response;
  TRITONBACKEND_Output *output, *none;
  TRITONSERVER_MemoryType memory = MEMORY_GPU;
  TRITONSERVER_DataType datatype;
  int64_t id = 1;
  void* buffer;
  const char* name;
  const int64_t shape[] = {1}, *found;
  uint64_t dims;
  size_t size;
  TRITONSERVER_BufferAttributes* attributes;
  report.call("New", TRITONBACKEND_ResponseNew(&response, subject.request));
  report.call("Output that the model has not",
              TRITONBACKEND_ResponseOutput(response, &none, "NONE", TYPE_FP32, shape, 1));
  report.call("Output", TRITONBACKEND_ResponseOutput(response, &output, "OUTPUT0", TYPE_BYTES, shape, 1));
  VALUE("OutputBuffer, asked of a GPU", TRITONBACKEND_OutputBuffer(output, &buffer, 100, &memory, &id),
               memory + id);
  memset(buffer, 0, 100);
  report.call("OutputBuffer again", TRITONBACKEND_OutputBuffer(output, &buffer, 10, &memory, &id));
  VALUE("OutputBufferAttributes", TRITONBACKEND_OutputBufferAttributes(output, &attributes), true);
  VALUE("their ByteSize", TRITONSERVER_BufferAttributesByteSize(attributes, &size), size);
  VALUE("InferenceResponseOutput 0",
               TRITONBACKEND_InferenceResponseOutput(response, 0, &name, &datatype, &found, &dims),
               std::string(name) + dims_of(found, dims));
  report.call("InferenceResponseOutput 1",
              TRITONBACKEND_InferenceResponseOutput(response, 1, &name, &datatype, &found, &dims));
  VALUE("InferenceResponseOutputByName",
               TRITONBACKEND_InferenceResponseOutputByName(response, "OUTPUT0", &datatype, &found, &dims), datatype);
  report.call("InferenceResponseOutputByName X",
              TRITONBACKEND_InferenceResponseOutputByName(response, "X", &datatype, &found, &dims));
  report.call("SetStringParameter", TRITONBACKEND_ResponseSetStringParameter(response, "s", "text"));
  report.call("SetBoolParameter", TRITONBACKEND_ResponseSetBoolParameter(response, "b", true));
  report.call("SetIntParameter", TRITONBACKEND_ResponseSetIntParameter(response, "i", -1));
  report.call("SetDoubleParameter", TRITONBACKEND_ResponseSetDoubleParameter(response, "d", 0.5));
  report.call("Delete", TRITONBACKEND_ResponseDelete(response));
  report.call("Output of null", TRITONBACKEND_ResponseOutput(nullptr, &none, "OUTPUT0", TYPE_BYTES, shape, 1));
  report.call("SetIntParameter of null", TRITONBACKEND_ResponseSetIntParameter(nullptr, "i", 1));
  report.call("Send of null", TRITONBACKEND_ResponseSend(nullptr, RESPONSE_FINAL, nullptr));
  report.call("New with too large an output", TRITONBACKEND_ResponseNew(&response, subject.request));
  report.call("its Output", TRITONBACKEND_ResponseOutput(response, &output, "OUTPUT0", TYPE_BYTES, shape, 1));
  report.call("its OutputBuffer", TRITONBACKEND_OutputBuffer(output, &buffer, 1ull << 60, &memory, &id));
  report.call("its Delete", TRITONBACKEND_ResponseDelete(response));
}

void factory(const Subject& subject, Report& report) {
  TRITONBACKEND_ResponseFactory* factory;
  TRITONBACKEND_Response* response;
  ResponseStatistics* statistics;
  bool is_cancelled;
  report.call("New", TRITONBACKEND_ResponseFactoryNew(&factory, subject.request));
  VALUE("IsCancelled", TRITONBACKEND_ResponseFactoryIsCancelled(factory, &is_cancelled), is_cancelled);
  report.call("ResponseNewFromFactory", TRITONBACKEND_ResponseNewFromFactory(&response, factory));
  report.call("ResponseDelete", TRITONBACKEND_ResponseDelete(response));
  TRITONBACKEND_ModelInstanceResponseStatisticsNew(&statistics);
  Error* error = TRITONSERVER_ErrorNew(ERROR_UNAVAILABLE, "broken");
  report.call("SetModelInstance",
              TRITONBACKEND_ModelInstanceResponseStatisticsSetModelInstance(statistics, subject.instance));
  report.call("ReportResponseStatistics without a factory",
              TRITONBACKEND_ModelInstanceReportResponseStatistics(statistics));
  report.call("SetResponseFactory",
              TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseFactory(statistics, factory));
  report.call("SetResponseStart", TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseStart(statistics, 1000));
  report.call("SetComputeOutputStart",
              TRITONBACKEND_ModelInstanceResponseStatisticsSetComputeOutputStart(statistics, 2000));
  report.call("SetResponseEnd", TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseEnd(statistics, 4000));
  report.call("ReportResponseStatistics", TRITONBACKEND_ModelInstanceReportResponseStatistics(statistics));
  report.call("SetError", TRITONBACKEND_ModelInstanceResponseStatisticsSetError(statistics, error));
  report.call("ReportResponseStatistics of an error", TRITONBACKEND_ModelInstanceReportResponseStatistics(statistics));
  TRITONBACKEND_ModelInstanceResponseStatisticsDelete(statistics);
  TRITONSERVER_ErrorDelete(error);
  report.call("Delete", TRITONBACKEND_ResponseFactoryDelete(factory));
}

// Of the request's trace; the answer shows whether there is one.
void trace(const Subject& subject, Report& report) {
  TRITONSERVER_InferenceTrace *trace, *child;
  const char* context;
  report.call("Trace", TRITONBACKEND_RequestTrace(subject.request, &trace));
  report.value("is there", trace != nullptr);
  report.call("SpawnChildTrace of none", TRITONSERVER_InferenceTraceSpawnChildTrace(nullptr, &child));
  if (!trace) return;
  report.call("SetContext", TRITONSERVER_InferenceTraceSetContext(trace, "{\"a\":1}"));
  report.call("SpawnChildTrace", TRITONSERVER_InferenceTraceSpawnChildTrace(trace, &child));
  VALUE("Context", TRITONSERVER_InferenceTraceContext(child, &context), context);
  report.call("Delete", TRITONSERVER_InferenceTraceDelete(child));
}

const std::pair<const char*, void (*)(const Subject&, Report&)> GROUPS[] = {
    {"values", values},   {"attributes", attributes}, {"backend", backend},   {"model", model}, {"instance", instance},
    {"request", request}, {"input", input},           {"response", response}, {"factory", factory}, {"trace", trace},
};

}  // namespace

EXPORTED Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  TRY(TRITONBACKEND_BackendSetExecutionPolicy(backend, EXECUTION_DEVICE_BLOCKING));
  return TRITONBACKEND_BackendSetState(backend, new std::string("kept"));
}

EXPORTED Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend) {
  void* state;
  TRY(TRITONBACKEND_BackendState(backend, &state));
  delete static_cast<std::string*>(state);
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                   TRITONBACKEND_Request** requests, uint32_t count) {
  Subject subject{nullptr, nullptr, instance, nullptr};
  TRY(TRITONBACKEND_ModelInstanceModel(instance, &subject.model));
  TRY(TRITONBACKEND_ModelBackend(subject.model, &subject.backend));
  for (uint32_t i = 0; i < count; ++i) {
    subject.request = requests[i];
    std::string group;
    TRY(command_of(requests[i], &group));
    Report report;
    for (auto [name, run] : GROUPS)
      if (group == name) run(subject, report);
    TRY(answer_with_text(requests[i], report.text()));
  }
  return nullptr;
}
