// The Python module `_triton_api`: creates C objects for the host's Python objects, and calls a backend's functions.
//
// Invariant: backend code runs without the GIL. An object is deleted by its capsule, hence after the host has dropped
// the Python object that owns the capsule.

#include "calls.h"
#include "inference.h"

void set_enabled_log_levels(unsigned mask);

namespace {

// new_backend(host, name, directory, config JSON)
PyObject* new_backend(PyObject*, PyObject* arguments) {
  PyObject* host = nullptr;
  const char *name = nullptr, *directory = nullptr, *config = nullptr;
  if (!PyArg_ParseTuple(arguments, "Osss", &host, &name, &directory, &config)) return nullptr;
  auto backend = std::make_unique<TRITONBACKEND_Backend>();
  backend->name = name;
  backend->directory = directory;
  backend->config.json = config;
  backend->host = host;
  return hold(std::move(backend), BACKEND);
}

// new_model(host, backend, name, version, directory, auto_complete)
PyObject* new_model(PyObject*, PyObject* arguments) {
  PyObject *host = nullptr, *backend = nullptr;
  const char *name = nullptr, *directory = nullptr;
  unsigned long long version = 0;
  int auto_complete = 0;
  if (!PyArg_ParseTuple(arguments, "OOsKsp", &host, &backend, &name, &version, &directory, &auto_complete))
    return nullptr;
  auto model = std::make_unique<TRITONBACKEND_Model>();
  model->name = name;
  model->directory = directory;
  model->version = version;
  model->auto_complete = auto_complete;
  model->backend = held<TRITONBACKEND_Backend>(backend, BACKEND);
  model->server.model = host;
  model->host = host;
  return model->backend ? hold(std::move(model), MODEL) : nullptr;
}

// new_instance(host, model, name, kind, device_id, is_passive, profiles, secondary devices, host policy JSON)
PyObject* new_instance(PyObject*, PyObject* arguments) {
  PyObject *host = nullptr, *model = nullptr, *profiles = nullptr, *devices = nullptr;
  const char *name = nullptr, *policy = nullptr;
  int kind = 0, device_id = 0, is_passive = 0;
  if (!PyArg_ParseTuple(arguments, "OOsiipOOs", &host, &model, &name, &kind, &device_id, &is_passive, &profiles,
                        &devices, &policy))
    return nullptr;
  auto instance = std::make_unique<TRITONBACKEND_ModelInstance>();
  instance->name = name;
  instance->kind = static_cast<TRITONSERVER_InstanceGroupKind>(kind);
  instance->device_id = device_id;
  instance->is_passive = is_passive;
  instance->host_policy.json = policy;
  instance->host = host;
  instance->model = held<TRITONBACKEND_Model>(model, MODEL);
  for (Py_ssize_t i = 0; i < PyTuple_Size(profiles); ++i) {
    instance->profiles.emplace_back();
    if (!read_text(PyTuple_GetItem(profiles, i), &instance->profiles.back())) return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_Size(devices); ++i) {
    const char* device_kind = nullptr;
    long long id = 0;
    if (!PyArg_ParseTuple(PyTuple_GetItem(devices, i), "sL", &device_kind, &id)) return nullptr;
    instance->secondary_devices.emplace_back(device_kind, id);
  }
  return instance->model && !PyErr_Occurred() ? hold(std::move(instance), INSTANCE) : nullptr;
}

// set_outputs(model, names): the outputs that its responses may have
PyObject* set_outputs(PyObject*, PyObject* arguments) {
  PyObject *capsule = nullptr, *names = nullptr;
  if (!PyArg_ParseTuple(arguments, "OO", &capsule, &names)) return nullptr;
  auto* model = held<TRITONBACKEND_Model>(capsule, MODEL);
  if (!model) return nullptr;
  for (Py_ssize_t i = 0; i < PyTuple_Size(names); ++i) {
    std::string name;
    if (!read_text(PyTuple_GetItem(names, i), &name)) return nullptr;
    model->outputs.insert(std::move(name));
  }
  return Py_NewRef(Py_None);
}

// execution_policy(backend): TRITONBACKEND_ExecutionPolicy as a number
PyObject* execution_policy(PyObject*, PyObject* backend) {
  auto* one = held<TRITONBACKEND_Backend>(backend, BACKEND);
  return one ? PyLong_FromLong(one->policy) : nullptr;
}

// call(function address, capsule): Initialize, Finalize or Ready of the object in the capsule, which may be an agent
PyObject* call(PyObject*, PyObject* arguments) {
  unsigned long long address = 0;
  PyObject* capsule = nullptr;
  if (!PyArg_ParseTuple(arguments, "KO", &address, &capsule)) return nullptr;
  void* object = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
  if (!object) return nullptr;
  Error* error = nullptr;
  {
    Unlocked unlocked;
    error = reinterpret_cast<Error* (*)(void*)>(address)(object);
  }
  return result_of(error);
}

// backend_attributes(function address, backend): (error | None, ((kind, count), …), parallel_instance_loading)
PyObject* backend_attributes(PyObject*, PyObject* arguments) {
  unsigned long long address = 0;
  PyObject* capsule = nullptr;
  if (!PyArg_ParseTuple(arguments, "KO", &address, &capsule)) return nullptr;
  auto* backend = held<TRITONBACKEND_Backend>(capsule, BACKEND);
  if (!backend) return nullptr;
  TRITONBACKEND_BackendAttribute attributes;
  Error* error = nullptr;
  {
    Unlocked unlocked;
    error = reinterpret_cast<Error* (*)(TRITONBACKEND_Backend*, TRITONBACKEND_BackendAttribute*)>(address)(backend,
                                                                                                      &attributes);
  }
  Ref groups(PyList_New(0)), failure(result_of(error));
  for (auto [kind, count] : attributes.groups) {
    Ref group(Py_BuildValue("(iK)", kind, static_cast<unsigned long long>(count)));
    if (!groups || !group || PyList_Append(groups.get(), group.get())) return nullptr;
  }
  return groups && failure ? Py_BuildValue("(OOO)", failure.get(), groups.get(),
                                           attributes.parallel_instance_loading ? Py_True : Py_False)
                           : nullptr;
}

// execute(function address, instance, requests): None if the backend owns the requests now, else (code, message)
PyObject* execute(PyObject*, PyObject* arguments) {
  unsigned long long address = 0;
  PyObject *capsule = nullptr, *items = nullptr;
  if (!PyArg_ParseTuple(arguments, "KOO", &address, &capsule, &items)) return nullptr;
  auto* instance = held<TRITONBACKEND_ModelInstance>(capsule, INSTANCE);
  if (!instance) return nullptr;
  std::vector<std::unique_ptr<TRITONBACKEND_Request>> requests;
  std::vector<TRITONBACKEND_Request*> pointers;
  for (Py_ssize_t i = 0; i < PyTuple_Size(items); ++i) {
    requests.push_back(read_request(PyTuple_GetItem(items, i)));
    if (!requests.back()) return nullptr;
    requests.back()->host->model = instance->model;
    pointers.push_back(requests.back().get());
  }
  using Execute = Error* (*)(TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request**, uint32_t);
  Deferral deferral;
  Error* error = nullptr;
  {
    Unlocked unlocked;
    error = reinterpret_cast<Execute>(address)(instance, pointers.data(), pointers.size());
  }
  if (error)
    deferral.forget();
  else
    for (auto& request : requests) request.release();  // the backend's: RequestRelease deletes it
  return result_of(error);
}

PyObject* set_host(PyObject*, PyObject* functions) {
  set_host_functions(functions);
  return Py_NewRef(Py_None);
}

PyObject* set_log_levels(PyObject*, PyObject* mask) {
  set_enabled_log_levels(static_cast<unsigned>(PyLong_AsUnsignedLong(mask)));
  return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
}

PyMethodDef methods[] = {
    {"set_host", set_host, METH_O, nullptr},
    {"set_log_levels", set_log_levels, METH_O, nullptr},
    {"new_backend", new_backend, METH_VARARGS, nullptr},
    {"new_model", new_model, METH_VARARGS, nullptr},
    {"set_outputs", set_outputs, METH_VARARGS, nullptr},
    {"new_instance", new_instance, METH_VARARGS, nullptr},
    {"execution_policy", execution_policy, METH_O, nullptr},
    {"call", call, METH_VARARGS, nullptr},
    {"backend_attributes", backend_attributes, METH_VARARGS, nullptr},
    {"execute", execute, METH_VARARGS, nullptr},
    {"deliver", deliver, METH_VARARGS, nullptr},
    {"new_batcher", new_batcher, METH_VARARGS, nullptr},
    {"new_batch", new_batch, METH_VARARGS, nullptr},
    {"batch_includes", batch_includes, METH_VARARGS, nullptr},
    {"finalize", finalize, METH_VARARGS, nullptr},
    {"new_agent", new_agent, METH_NOARGS, nullptr},
    {"new_agent_model", new_agent_model, METH_VARARGS, nullptr},
    {"call_agent", call_agent, METH_VARARGS, nullptr},
    {"new_cache", new_cache, METH_VARARGS, nullptr},
    {"cache_lookup", cache_lookup, METH_VARARGS, nullptr},
    {"cache_insert", cache_insert, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_triton_api", nullptr, -1, methods, nullptr, nullptr, nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__triton_api() {
  PyObject* module = PyModule_Create(&definition);
  if (module && !init_python(module)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
