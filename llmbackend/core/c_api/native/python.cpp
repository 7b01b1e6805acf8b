// The interface between C++ and the host's Python objects: conversions, errors, deferred calls.

#include "objects.h"

#include <atomic>

namespace {

PyObject* host_functions = nullptr;  // the module host_calls.py

thread_local std::vector<std::function<Error*()>>* deferred = nullptr;  // while this thread is in Execute

// --- an object with the buffer protocol that owns memory of a backend ---

struct OwnedBuffer {
  PyObject_HEAD
  char* data;
  Py_ssize_t byte_size;
};

PyTypeObject* owned_buffer_type = nullptr;

void owned_buffer_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete[] reinterpret_cast<OwnedBuffer*>(self)->data;
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

int owned_buffer_get(PyObject* self, Py_buffer* view, int flags) {
  auto* buffer = reinterpret_cast<OwnedBuffer*>(self);
  return PyBuffer_FillInfo(view, self, buffer->data, buffer->byte_size, 0, flags);
}

PyType_Slot owned_buffer_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(owned_buffer_dealloc)},
    {Py_bf_getbuffer, reinterpret_cast<void*>(owned_buffer_get)},
    {0, nullptr},
};
PyType_Spec owned_buffer_spec = {"llmbackend.core.c_api._triton_api.OwnedBuffer", sizeof(OwnedBuffer), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, owned_buffer_slots};

}  // namespace

bool init_python(PyObject* module) {
  owned_buffer_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&owned_buffer_spec));
  return owned_buffer_type && PyModule_AddObjectRef(module, "OwnedBuffer", reinterpret_cast<PyObject*>(owned_buffer_type)) == 0;
}

void set_host_functions(PyObject* functions) {
  Py_INCREF(functions);
  Py_XDECREF(host_functions);
  host_functions = functions;
}

// --- errors -----------------------------------------------------------------------------------------------------------

Error* take_exception() {
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (value && trace) PyException_SetTraceback(value, trace);
  Ref own_type(type), own_value(value), own_trace(trace);
  Ref pair(PyObject_CallMethod(host_functions, "error_of", "O", value ? value : Py_None));
  int code = 0;
  std::string message = "an exception in the host";
  PyObject* shown = nullptr;
  if (pair && PyArg_ParseTuple(pair.get(), "iO", &code, &shown)) read_text(shown, &message);
  PyErr_Clear();
  return new_error(static_cast<TRITONSERVER_Error_Code>(code), message);
}

Error* call_method(PyObject* object, const char* name, PyObject* arguments, Ref* result) {
  Ref own(arguments);
  if (!own) return take_exception();
  Ref method(PyObject_GetAttrString(object, name));
  if (!method) return take_exception();
  Ref value(PyObject_CallObject(method.get(), own.get()));
  if (!value) return take_exception();
  if (result) *result = std::move(value);
  return nullptr;
}

Error* host_call(const char* name, PyObject* arguments, Ref* result) {
  return call_method(host_functions, name, arguments, result);
}

void log_error(Error* error) {
  if (!error) return;
  Error* failed = host_call("log_error", Py_BuildValue("(is)", error->code, error->message.c_str()));
  delete failed;
  delete error;
}

// --- the lock ---------------------------------------------------------------------------------------------------------

Error* with_lock(When when, std::function<Error*()> call) {
  if (when == When::AFTER_EXECUTE && deferred) {
    deferred->push_back(std::move(call));
    return nullptr;
  }
  Locked lock;
  return call();
}

Deferral::Deferral() : outer_(deferred) { deferred = &calls_; }

Deferral::~Deferral() {
  deferred = outer_;
  for (auto& call : calls_) {
    log_error(call());
    call = nullptr;  // what it holds must not look like a response that is still to come
  }
}

// --- conversions ------------------------------------------------------------------------------------------------------

PyObject* text(const std::string& value) { return PyUnicode_DecodeUTF8(value.data(), value.size(), "replace"); }

PyObject* shape_tuple(const std::vector<int64_t>& dims) {
  PyObject* tuple = PyTuple_New(dims.size());
  for (size_t i = 0; tuple && i < dims.size(); ++i) {
    PyObject* dim = PyLong_FromLongLong(dims[i]);
    if (!dim || PyTuple_SetItem(tuple, i, dim)) {
      Py_DECREF(tuple);
      return nullptr;
    }
  }
  return tuple;
}

namespace {

PyObject* parameter_value(const TRITONSERVER_Parameter& parameter) {
  switch (parameter.type) {
    case PARAMETER_STRING: return text(std::get<std::string>(parameter.data));
    case PARAMETER_INT: return PyLong_FromLongLong(std::get<int64_t>(parameter.data));
    case PARAMETER_BOOL: return PyBool_FromLong(std::get<bool>(parameter.data));
    case PARAMETER_DOUBLE: return PyFloat_FromDouble(std::get<double>(parameter.data));
    default:
      return PyBytes_FromStringAndSize(static_cast<const char*>(std::get<const void*>(parameter.data)),
                                       parameter.byte_size);
  }
}

}  // namespace

PyObject* parameter_dict(const Parameters& parameters) {
  Ref dict(PyDict_New());
  for (const auto& parameter : parameters) {
    Ref name(text(parameter.name)), value(parameter_value(parameter));
    if (!dict || !name || !value || PyDict_SetItem(dict.get(), name.get(), value.get())) return nullptr;
  }
  return dict.release();
}

bool read_text(PyObject* value, std::string* out) {
  Ref bytes(PyUnicode_AsEncodedString(value, "utf-8", "replace"));
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (!bytes || PyBytes_AsStringAndSize(bytes.get(), &data, &size)) return false;
  out->assign(data, size);
  return true;
}

bool read_dims(PyObject* value, std::vector<int64_t>* dims) {
  Py_ssize_t count = PyTuple_Size(value);
  if (count < 0) return false;
  dims->resize(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    (*dims)[i] = PyLong_AsLongLong(PyTuple_GetItem(value, i));
    if ((*dims)[i] == -1 && PyErr_Occurred()) return false;
  }
  return true;
}

bool read_parameters(PyObject* dict, Parameters* parameters) {
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value)) {
    TRITONSERVER_Parameter parameter{"", PARAMETER_STRING, std::string()};
    if (!read_text(key, &parameter.name)) return false;
    if (PyBool_Check(value)) {
      parameter.type = PARAMETER_BOOL;
      parameter.data = value == Py_True;
    } else if (PyLong_Check(value)) {
      parameter.type = PARAMETER_INT;
      parameter.data = static_cast<int64_t>(PyLong_AsLongLong(value));
    } else if (PyFloat_Check(value)) {
      parameter.type = PARAMETER_DOUBLE;
      parameter.data = PyFloat_AsDouble(value);
    } else if (std::string string; read_text(value, &string)) {
      parameter.data = std::move(string);
    }
    if (PyErr_Occurred()) return false;
    parameters->push_back(std::move(parameter));
  }
  return true;
}

PyObject* take_buffer(Buffer&& buffer) {
  auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(owned_buffer_type, Py_tp_alloc));
  PyObject* object = allocate(owned_buffer_type, 0);
  if (!object) return nullptr;
  auto* owned = reinterpret_cast<OwnedBuffer*>(object);
  owned->byte_size = buffer.attributes.byte_size;
  owned->data = buffer.data.release();
  return object;
}
