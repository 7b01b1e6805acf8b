// Shared by the functions of the Python module.
#pragma once

#include "objects.h"

constexpr const char* BACKEND = "llmbackend.Backend";
constexpr const char* MODEL = "llmbackend.Model";
constexpr const char* INSTANCE = "llmbackend.ModelInstance";

// The object in a capsule; null = an exception is set.
template <typename T>
T* held(PyObject* capsule, const char* name) {
  return static_cast<T*>(PyCapsule_GetPointer(capsule, name));
}

// A capsule that owns the object; null = an exception is set.
template <typename T>
PyObject* hold(std::unique_ptr<T> object, const char* name) {
  PyObject* capsule = PyCapsule_New(object.get(), name, [](PyObject* self) {
    delete static_cast<T*>(PyCapsule_GetPointer(self, PyCapsule_GetName(self)));
  });
  if (capsule) object.release();
  return capsule;
}

// None, or (code, message) of an error, which is deleted.
PyObject* result_of(Error* error);

// One request of `execute`: (host, id, correlation, flags, timeout_us, parameters, inputs, outputs, trace, context).
// Null = an exception is set.
std::unique_ptr<TRITONBACKEND_Request> read_request(PyObject* item);

// (error | None, address), for what a library has created.
PyObject* error_and_address(Error* error, const void* made);

PyObject* new_agent(PyObject* module, PyObject* nothing);
PyObject* new_agent_model(PyObject* module, PyObject* arguments);
PyObject* call_agent(PyObject* module, PyObject* arguments);
PyObject* new_cache(PyObject* module, PyObject* arguments);
PyObject* cache_lookup(PyObject* module, PyObject* arguments);
PyObject* cache_insert(PyObject* module, PyObject* arguments);
PyObject* new_batcher(PyObject* module, PyObject* arguments);
PyObject* new_batch(PyObject* module, PyObject* arguments);
PyObject* batch_includes(PyObject* module, PyObject* arguments);
PyObject* finalize(PyObject* module, PyObject* arguments);
