// TRITONBACKEND_Backend, _Model, _ModelInstance, their attributes and statistics, the memory manager, the log.

#include <atomic>
#include <new>

#include "objects.h"

namespace {

std::atomic<unsigned> enabled_log_levels{1u << LOG_INFO | 1u << LOG_WARN | 1u << LOG_ERROR};

TRITONSERVER_Message* message_copy(const Ref& value) {
  auto* message = new TRITONSERVER_Message;
  read_text(value.get(), &message->json);
  return message;
}

Error* memory_usage(PyObject* host, TRITONSERVER_BufferAttributes** usage, uint32_t count) {
  Locked lock;
  Ref list(PyList_New(0));
  for (uint32_t i = 0; i < count; ++i) {
    const auto& entry = *usage[i];
    Ref item(Py_BuildValue("(iLn)", entry.memory_type, static_cast<long long>(entry.memory_type_id),
                           static_cast<Py_ssize_t>(entry.byte_size)));
    if (!list || !item || PyList_Append(list.get(), item.get())) return take_exception();
  }
  return host_call("report_memory_usage", Py_BuildValue("(OO)", host, list.get()));
}

Error* check_config_version(uint32_t version) {
  if (version == 1) return nullptr;
  return invalid("model configuration version " + std::to_string(version) +
                 " not supported, supported versions are: 1");
}

}  // namespace

void set_enabled_log_levels(unsigned mask) { enabled_log_levels = mask; }

// --- log --------------------------------------------------------------------------------------------------------------

EXPORTED bool TRITONSERVER_LogIsEnabled(TRITONSERVER_LogLevel level) { return enabled_log_levels >> level & 1; }

EXPORTED Error* TRITONSERVER_LogMessage(TRITONSERVER_LogLevel level, const char* file, int line, const char* message) {
  if (level > LOG_VERBOSE) return invalid("unknown logging level '" + std::to_string(level) + "'");
  if (!TRITONSERVER_LogIsEnabled(level)) return nullptr;
  Locked lock;
  Ref shown(text(message));
  return host_call("log_message", Py_BuildValue("(isiO)", level, file, line, shown.get()));
}

// --- memory -----------------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONBACKEND_MemoryManagerAllocate(TRITONBACKEND_MemoryManager*, void** buffer,
                                                    TRITONSERVER_MemoryType type, int64_t, uint64_t byte_size) {
  if (type == MEMORY_GPU) return new_error(ERROR_UNSUPPORTED, "GPU memory allocation not supported");
  if (type == MEMORY_CPU_PINNED) return new_error(ERROR_UNSUPPORTED, "Pinned memory allocation not supported");
  *buffer = new (std::nothrow) char[byte_size ? byte_size : 1];
  if (*buffer) return nullptr;
  return new_error(ERROR_UNAVAILABLE, "unable to allocate " + std::to_string(byte_size) + " bytes of CPU memory");
}

EXPORTED Error* TRITONBACKEND_MemoryManagerFree(TRITONBACKEND_MemoryManager*, void* buffer,
                                                TRITONSERVER_MemoryType type, int64_t) {
  if (type != MEMORY_CPU) return new_error(ERROR_UNSUPPORTED, "only CPU memory is allocated here");
  delete[] static_cast<char*>(buffer);
  return nullptr;
}

// --- backend ----------------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONBACKEND_BackendName(TRITONBACKEND_Backend* backend, const char** name) {
  *name = backend->name.c_str();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_BackendConfig(TRITONBACKEND_Backend* backend, TRITONSERVER_Message** config) {
  *config = &backend->config;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_BackendExecutionPolicy(TRITONBACKEND_Backend* backend,
                                                     TRITONBACKEND_ExecutionPolicy* policy) {
  *policy = backend->policy;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_BackendSetExecutionPolicy(TRITONBACKEND_Backend* backend,
                                                        TRITONBACKEND_ExecutionPolicy policy) {
  backend->policy = policy;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_BackendArtifacts(TRITONBACKEND_Backend* backend, TRITONBACKEND_ArtifactType* type,
                                               const char** location) {
  *type = ARTIFACT_FILESYSTEM;
  *location = backend->directory.c_str();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_BackendMemoryManager(TRITONBACKEND_Backend* backend,
                                                   TRITONBACKEND_MemoryManager** manager) {
  *manager = &backend->memory_manager;
  return nullptr;
}

#define STATE_SLOT(TYPE, NAME)                                                \
  EXPORTED Error* TRITONBACKEND_##NAME##State(TYPE* object, void** state) {   \
    *state = object->state;                                                   \
    return nullptr;                                                           \
  }                                                                           \
  EXPORTED Error* TRITONBACKEND_##NAME##SetState(TYPE* object, void* state) { \
    object->state = state;                                                    \
    return nullptr;                                                           \
  }
STATE_SLOT(TRITONBACKEND_Backend, Backend)
STATE_SLOT(TRITONBACKEND_Model, Model)
STATE_SLOT(TRITONBACKEND_ModelInstance, ModelInstance)
#undef STATE_SLOT

EXPORTED Error* TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(TRITONBACKEND_BackendAttribute* attributes,
                                                                        TRITONSERVER_InstanceGroupKind kind,
                                                                        uint64_t count, const uint64_t*, uint64_t) {
  attributes->groups.emplace_back(kind, count);
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading(
    TRITONBACKEND_BackendAttribute* attributes, bool enabled) {
  attributes->parallel_instance_loading = enabled;
  return nullptr;
}

// --- model ------------------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONBACKEND_ModelName(TRITONBACKEND_Model* model, const char** name) {
  *name = model->name.c_str();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelVersion(TRITONBACKEND_Model* model, uint64_t* version) {
  *version = model->version;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelRepository(TRITONBACKEND_Model* model, TRITONBACKEND_ArtifactType* type,
                                              const char** location) {
  *type = ARTIFACT_FILESYSTEM;
  *location = model->directory.c_str();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelConfig(TRITONBACKEND_Model* model, uint32_t version,
                                          TRITONSERVER_Message** config) {
  if (Error* error = check_config_version(version)) return error;
  Locked lock;
  Ref json;
  if (Error* error = host_call("model_config", Py_BuildValue("(O)", model->host), &json)) return error;
  *config = message_copy(json);
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelAutoCompleteConfig(TRITONBACKEND_Model* model, bool* enabled) {
  *enabled = model->auto_complete;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelSetConfig(TRITONBACKEND_Model* model, uint32_t version,
                                             TRITONSERVER_Message* config) {
  if (Error* error = check_config_version(version)) return error;
  Locked lock;
  Ref json(text(config->json));
  return host_call("set_model_config", Py_BuildValue("(OO)", model->host, json.get()));
}

EXPORTED Error* TRITONBACKEND_ModelServer(TRITONBACKEND_Model* model, TRITONSERVER_Server** server) {
  *server = &model->server;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelBackend(TRITONBACKEND_Model* model, TRITONBACKEND_Backend** backend) {
  *backend = model->backend;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelReportMemoryUsage(TRITONBACKEND_Model* model, TRITONSERVER_BufferAttributes** usage,
                                                     uint32_t count) {
  return memory_usage(model->host, usage, count);
}

// --- instance ---------------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONBACKEND_ModelInstanceName(TRITONBACKEND_ModelInstance* instance, const char** name) {
  *name = instance->name.c_str();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceKind(TRITONBACKEND_ModelInstance* instance,
                                                TRITONSERVER_InstanceGroupKind* kind) {
  *kind = instance->kind;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceDeviceId(TRITONBACKEND_ModelInstance* instance, int32_t* device_id) {
  *device_id = instance->device_id;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceHostPolicy(TRITONBACKEND_ModelInstance* instance,
                                                      TRITONSERVER_Message** policy) {
  *policy = &instance->host_policy;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceIsPassive(TRITONBACKEND_ModelInstance* instance, bool* is_passive) {
  *is_passive = instance->is_passive;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceProfileCount(TRITONBACKEND_ModelInstance* instance, uint32_t* count) {
  *count = instance->profiles.size();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceProfileName(TRITONBACKEND_ModelInstance* instance, uint32_t index,
                                                       const char** name) {
  *name = nullptr;
  if (index >= instance->profiles.size())
    return out_of_bounds(index, "instance is configured with", instance->profiles.size(), "profiles");
  *name = instance->profiles[index].c_str();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceSecondaryDeviceCount(TRITONBACKEND_ModelInstance* instance,
                                                                uint32_t* count) {
  *count = instance->secondary_devices.size();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceSecondaryDeviceProperties(TRITONBACKEND_ModelInstance* instance,
                                                                     uint32_t index, const char** kind, int64_t* id) {
  if (index >= instance->secondary_devices.size())
    return out_of_bounds(index, "instance is configured with", instance->secondary_devices.size(), "secondary devices");
  *kind = instance->secondary_devices[index].first.c_str();
  *id = instance->secondary_devices[index].second;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceModel(TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Model** model) {
  *model = instance->model;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceReportMemoryUsage(TRITONBACKEND_ModelInstance* instance,
                                                             TRITONSERVER_BufferAttributes** usage, uint32_t count) {
  return memory_usage(instance->host, usage, count);
}

// --- statistics -------------------------------------------------------------------------------------------------------

using Nanoseconds = unsigned long long;

EXPORTED Error* TRITONBACKEND_ModelInstanceReportStatistics(TRITONBACKEND_ModelInstance* instance,
                                                            TRITONBACKEND_Request* request, bool success,
                                                            uint64_t exec_start_ns, uint64_t compute_start_ns,
                                                            uint64_t compute_end_ns, uint64_t exec_end_ns) {
  auto source = request->host;  // the request may be gone when a deferred call runs
  return with_lock(When::AFTER_EXECUTE, [=] {
    return call_method(instance->host, "report_statistics",
                       Py_BuildValue("(OOKKKK)", source->request.get(), success ? Py_True : Py_False,
                                     Nanoseconds{exec_start_ns}, Nanoseconds{compute_start_ns},
                                     Nanoseconds{compute_end_ns}, Nanoseconds{exec_end_ns}));
  });
}

EXPORTED Error* TRITONBACKEND_ModelInstanceReportBatchStatistics(TRITONBACKEND_ModelInstance* instance,
                                                                 uint64_t batch_size, uint64_t exec_start_ns,
                                                                 uint64_t compute_start_ns, uint64_t compute_end_ns,
                                                                 uint64_t exec_end_ns) {
  return with_lock(When::AFTER_EXECUTE, [=] {
    return call_method(instance->host, "report_batch_statistics",
                       Py_BuildValue("(KKKKK)", Nanoseconds{batch_size}, Nanoseconds{exec_start_ns},
                                     Nanoseconds{compute_start_ns}, Nanoseconds{compute_end_ns},
                                     Nanoseconds{exec_end_ns}));
  });
}

struct TRITONBACKEND_ModelInstanceResponseStatistics {
  TRITONBACKEND_ModelInstance* instance = nullptr;
  TRITONBACKEND_ResponseFactory* factory = nullptr;
  uint64_t response_start_ns = 0, compute_output_start_ns = 0, response_end_ns = 0;
  Error* error = nullptr;
};
using ResponseStatistics = TRITONBACKEND_ModelInstanceResponseStatistics;

EXPORTED Error* TRITONBACKEND_ModelInstanceResponseStatisticsNew(ResponseStatistics** statistics) {
  *statistics = new ResponseStatistics;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceResponseStatisticsDelete(ResponseStatistics* statistics) {
  delete statistics;
  return nullptr;
}

#define SET_FIELD(NAME, C_TYPE, FIELD)                                                                       \
  EXPORTED Error* TRITONBACKEND_ModelInstanceResponseStatisticsSet##NAME(ResponseStatistics* statistics,     \
                                                                         C_TYPE value) {                     \
    statistics->FIELD = value;                                                                               \
    return nullptr;                                                                                          \
  }
SET_FIELD(ModelInstance, TRITONBACKEND_ModelInstance*, instance)
SET_FIELD(ResponseFactory, TRITONBACKEND_ResponseFactory*, factory)
SET_FIELD(ResponseStart, uint64_t, response_start_ns)
SET_FIELD(ComputeOutputStart, uint64_t, compute_output_start_ns)
SET_FIELD(ResponseEnd, uint64_t, response_end_ns)
SET_FIELD(Error, Error*, error)
#undef SET_FIELD

EXPORTED Error* TRITONBACKEND_ModelInstanceReportResponseStatistics(ResponseStatistics* statistics) {
  if (!statistics->instance || !statistics->factory)
    return invalid("response statistics need a model instance and a response factory");
  Locked lock;
  Error* error = statistics->error;
  Ref failure(error ? Py_BuildValue("(is)", error->code, error->message.c_str()) : Ref::borrowed(Py_None).release());
  return host_call("report_response_statistics",
                   Py_BuildValue("(OOKKKO)", statistics->instance->host, statistics->factory->host->factory.get(),
                                 Nanoseconds{statistics->response_start_ns},
                                 Nanoseconds{statistics->compute_output_start_ns},
                                 Nanoseconds{statistics->response_end_ns}, failure.get()));
}
