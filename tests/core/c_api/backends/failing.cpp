// Fails where its configuration says: a model's parameter "fail", or the backend's setting "fail", names the function.
#include <string>

#include "functions.h"

namespace {

std::string json_of(TRITONSERVER_Message* message) {
  const char* json;
  size_t size;
  if (Error* error = TRITONSERVER_MessageSerializeToJson(message, &json, &size)) return Report::shown(error);
  return std::string(json, size);
}

// The error of a function that the text names.
Error* failure(const std::string& where, const char* function) {
  if (where.find(std::string("\"") + function + "\"") == std::string::npos) return nullptr;
  return TRITONSERVER_ErrorNew(ERROR_UNAVAILABLE, (std::string(function) + " fails").c_str());
}

Error* backend_failure(TRITONBACKEND_Backend* backend, const char* function) {
  TRITONSERVER_Message* config;
  TRY(TRITONBACKEND_BackendConfig(backend, &config));
  return failure(json_of(config), function);
}

Error* model_failure(TRITONBACKEND_Model* model, const char* function) {
  TRITONSERVER_Message* config;
  TRY(TRITONBACKEND_ModelConfig(model, 1, &config));
  std::string json = json_of(config);
  TRY(TRITONSERVER_MessageDelete(config));
  return failure(json, function);
}

Error* instance_failure(TRITONBACKEND_ModelInstance* instance, const char* function) {
  TRITONBACKEND_Model* model;
  TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
  return model_failure(model, function);
}

void note(const char* text) {
  if (Error* error = TRITONSERVER_LogMessage(LOG_INFO, "failing.cpp", 1, text)) TRITONSERVER_ErrorDelete(error);
}

}  // namespace

EXPORTED Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend* backend) {
  note("Initialize");
  return backend_failure(backend, "Initialize");
}

EXPORTED Error* TRITONBACKEND_Finalize(TRITONBACKEND_Backend* backend) {
  note("Finalize");
  return backend_failure(backend, "Finalize");
}

EXPORTED Error* TRITONBACKEND_GetBackendAttribute(TRITONBACKEND_Backend* backend,
                                                  TRITONBACKEND_BackendAttribute* attributes) {
  TRY(TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(attributes, KIND_CPU, 3, nullptr, 0));
  TRY(TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading(attributes, true));
  return backend_failure(backend, "GetBackendAttribute");
}

EXPORTED Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  note("ModelInitialize");
  return model_failure(model, "ModelInitialize");
}

EXPORTED Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  note("ModelFinalize");
  return model_failure(model, "ModelFinalize");
}

EXPORTED Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
  note("ModelInstanceInitialize");
  return instance_failure(instance, "ModelInstanceInitialize");
}

EXPORTED Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
  note("ModelInstanceFinalize");
  return instance_failure(instance, "ModelInstanceFinalize");
}

EXPORTED Error* TRITONBACKEND_ModelInstanceReady(TRITONBACKEND_ModelInstance* instance) {
  return instance_failure(instance, "ModelInstanceReady");
}

EXPORTED Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                   TRITONBACKEND_Request** requests, uint32_t count) {
  TRY(instance_failure(instance, "ModelInstanceExecute"));
  for (uint32_t i = 0; i < count; ++i) TRY(answer_with_text(requests[i], "fine"));
  return nullptr;
}
