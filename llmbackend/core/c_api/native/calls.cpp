// Reads the arguments that the host's Python code passes to a backend's functions; calls a batching strategy's.

#include "calls.h"

PyObject* result_of(Error* error) {
  if (!error) return Py_NewRef(Py_None);
  std::unique_ptr<Error> owned(error);
  Ref message(text(error->message));
  return message ? Py_BuildValue("(iO)", error->code, message.get()) : nullptr;
}

namespace {

bool read_input(PyObject* item, TRITONBACKEND_Input* input) {
  PyObject *name = nullptr, *dims = nullptr, *data = nullptr;
  const char* datatype = nullptr;
  if (!PyArg_ParseTuple(item, "OsOO", &name, &datatype, &dims, &data)) return false;
  input->datatype = datatype_of(datatype);
  Py_buffer view;
  if (!read_text(name, &input->name) || !read_dims(dims, &input->dims) || PyObject_GetBuffer(data, &view, PyBUF_SIMPLE))
    return false;
  input->data = view.buf;
  input->attributes.byte_size = view.len;
  input->owner = Ref::borrowed(data);  // a memoryview: it pins the memory for as long as it lives
  PyBuffer_Release(&view);
  return true;
}

}  // namespace

std::unique_ptr<TRITONBACKEND_Request> read_request(PyObject* item) {
  PyObject *host = nullptr, *id = nullptr, *correlation = nullptr, *parameters = nullptr, *inputs = nullptr,
           *outputs = nullptr, *trace = nullptr;
  const char* context = nullptr;
  unsigned flags = 0;
  unsigned long long timeout_us = 0;
  if (!PyArg_ParseTuple(item, "OOOIKOOOOs", &host, &id, &correlation, &flags, &timeout_us, &parameters, &inputs,
                        &outputs, &trace, &context))
    return nullptr;
  auto request = std::make_unique<TRITONBACKEND_Request>();
  request->host = SourcePtr::make();
  request->host->request = Ref::borrowed(host);
  request->flags = flags;
  request->timeout_us = timeout_us;
  if (!read_text(id, &request->id) || !read_parameters(parameters, &request->parameters)) return nullptr;
  if (PyLong_Check(correlation)) {
    request->correlation_id = PyLong_AsUnsignedLongLongMask(correlation);
  } else {
    request->has_text_correlation = true;
    if (!read_text(correlation, &request->correlation_text)) return nullptr;
  }
  request->inputs.resize(PyTuple_Size(inputs));
  for (size_t i = 0; i < request->inputs.size(); ++i)
    if (!read_input(PyTuple_GetItem(inputs, i), &request->inputs[i])) return nullptr;
  request->outputs.resize(PyTuple_Size(outputs));
  for (size_t i = 0; i < request->outputs.size(); ++i)
    if (!read_text(PyTuple_GetItem(outputs, i), &request->outputs[i])) return nullptr;
  if (trace != Py_None) {
    request->trace = std::make_unique<TRITONSERVER_InferenceTrace>();
    request->trace->trace = Ref::borrowed(trace);
    request->trace->context = context;
  }
  return PyErr_Occurred() ? nullptr : std::move(request);
}

// --- batching strategies: TRITONBACKEND_ModelBatch*, of a library next to a model --------------------------------------

PyObject* error_and_address(Error* error, const void* made) {
  Ref failure(result_of(error));
  return failure ? Py_BuildValue("(OK)", failure.get(), reinterpret_cast<unsigned long long>(made)) : nullptr;
}

// new_batcher(address of ModelBatcherInitialize, model): (error | None, batcher)
PyObject* new_batcher(PyObject*, PyObject* arguments) {
  unsigned long long address = 0;
  PyObject* capsule = nullptr;
  if (!PyArg_ParseTuple(arguments, "KO", &address, &capsule)) return nullptr;
  auto* model = held<TRITONBACKEND_Model>(capsule, MODEL);
  if (!model) return nullptr;
  TRITONBACKEND_Batcher* batcher = nullptr;
  Error* error = nullptr;
  {
    Unlocked unlocked;
    error = reinterpret_cast<Error* (*)(TRITONBACKEND_Batcher**, TRITONBACKEND_Model*)>(address)(&batcher, model);
  }
  return error_and_address(error, batcher);
}

// new_batch(address of ModelBatchInitialize, batcher): (error | None, batch)
PyObject* new_batch(PyObject*, PyObject* arguments) {
  unsigned long long address = 0, batcher = 0;
  if (!PyArg_ParseTuple(arguments, "KK", &address, &batcher)) return nullptr;
  void* batch = nullptr;
  Error* error = nullptr;
  {
    Unlocked unlocked;
    error = reinterpret_cast<Error* (*)(const void*, void**)>(address)(reinterpret_cast<const void*>(batcher), &batch);
  }
  return error_and_address(error, batch);
}

// batch_includes(address of ModelBatchIncludeRequest, request, batch): (error | None, whether)
PyObject* batch_includes(PyObject*, PyObject* arguments) {
  unsigned long long address = 0, batch = 0;
  PyObject* item = nullptr;
  if (!PyArg_ParseTuple(arguments, "KOK", &address, &item, &batch)) return nullptr;
  auto request = read_request(item);
  if (!request) return nullptr;
  bool included = false;
  Error* error = nullptr;
  {
    Unlocked unlocked;
    error = reinterpret_cast<Error* (*)(TRITONBACKEND_Request*, void*, bool*)>(address)(
        request.get(), reinterpret_cast<void*>(batch), &included);
  }
  Ref failure(result_of(error));
  return failure ? Py_BuildValue("(OO)", failure.get(), included ? Py_True : Py_False) : nullptr;
}

// finalize(address, object): for a batcher, a batch or a cache
PyObject* finalize(PyObject*, PyObject* arguments) {
  unsigned long long address = 0, object = 0;
  if (!PyArg_ParseTuple(arguments, "KK", &address, &object)) return nullptr;
  Error* error = nullptr;
  {
    Unlocked unlocked;
    error = reinterpret_cast<Error* (*)(void*)>(address)(reinterpret_cast<void*>(object));
  }
  return result_of(error);
}
