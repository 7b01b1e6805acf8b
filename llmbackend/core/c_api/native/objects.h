// The definitions of the C API's opaque types, and how C++ calls the host's Python objects.
//
// Invariants: an object of a backend, model, instance, request or factory owns one reference to its Python counterpart;
// reference counts and Python objects are accessed only while holding the GIL; no function of the API throws.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "api.h"

// --- plain values -----------------------------------------------------------------------------------------------------

struct TRITONSERVER_Error {
  TRITONSERVER_Error_Code code;
  std::string message;
};

Error* new_error(TRITONSERVER_Error_Code code, std::string message);
Error* invalid(std::string message);

// "out of bounds index 3: request has 2 inputs", after `tag`. owner: "request has"; what: "inputs"
Error* out_of_bounds(uint32_t index, const std::string& owner, size_t count, const char* what,
                     const std::string& tag = "");

struct TRITONSERVER_Message {
  std::string json;
};

struct TRITONSERVER_Parameter {
  std::string name;
  TRITONSERVER_ParameterType type;
  std::variant<std::string, int64_t, bool, double, const void*> data;
  uint64_t byte_size = 0;  // of PARAMETER_BYTES, which are not copied

  const void* pointer() const;
};
using Parameters = std::vector<TRITONSERVER_Parameter>;

struct TRITONSERVER_BufferAttributes {
  size_t byte_size = 0;
  TRITONSERVER_MemoryType memory_type = MEMORY_CPU;
  int64_t memory_type_id = 0;
  void* cuda_ipc_handle = nullptr;
};

// Memory filled by a backend; a Python object takes it over when it is sent.
struct Buffer {
  std::unique_ptr<char[]> data;
  TRITONSERVER_BufferAttributes attributes;

  // Raises UNAVAILABLE if there is no memory.
  Error* allocate(size_t byte_size);
};

struct Shape {
  std::string name;
  TRITONSERVER_DataType datatype = TYPE_INVALID;
  std::vector<int64_t> dims;
};

const char* datatype_name(TRITONSERVER_DataType datatype);
TRITONSERVER_DataType datatype_of(const char* name);

// --- Python -----------------------------------------------------------------------------------------------------------

// Holds the GIL. Reentrant.
class Locked {
 public:
  Locked() : state_(PyGILState_Ensure()) {}
  ~Locked() { PyGILState_Release(state_); }
  Locked(const Locked&) = delete;

 private:
  PyGILState_STATE state_;
};

// Releases the GIL while backend code runs.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// An owned reference, dropped while holding the GIL.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Calls `object.<name>(*arguments)` while holding the GIL. Takes over `arguments` (a tuple; null = an exception is
// set). An exception becomes an error.
Error* call_method(PyObject* object, const char* name, PyObject* arguments, Ref* result = nullptr);

// `call_method` for a function of host_calls.py.
Error* host_call(const char* name, PyObject* arguments, Ref* result = nullptr);

// The pending exception as an error; clears it.
Error* take_exception();

PyObject* text(const std::string& value);                    // str; bytes that are not UTF-8 are replaced
PyObject* shape_tuple(const std::vector<int64_t>& dims);     // tuple of int
PyObject* parameter_dict(const Parameters& parameters);      // dict of str, int, bool, float
PyObject* take_buffer(Buffer&& buffer);                      // an object with the buffer protocol that owns the memory
bool read_parameters(PyObject* dict, Parameters* parameters);  // false = an exception is set
bool read_text(PyObject* value, std::string* out);
bool read_dims(PyObject* value, std::vector<int64_t>* dims);

// Runs `call` with the GIL: at once or, for AFTER_EXECUTE on a thread that is in Execute, when Execute has returned,
// so that the GIL is taken once for all such calls. AFTER_EXECUTE is for calls whose effect no client waits for. The
// error of a deferred call is logged.
enum class When { NOW, AFTER_EXECUTE };
Error* with_lock(When when, std::function<Error*()> call);

// During its lifetime, calls of this thread may be deferred; its destructor, which needs the GIL, runs them.
class Deferral {
 public:
  Deferral();
  ~Deferral();
  Deferral(const Deferral&) = delete;
  void forget() { calls_.clear(); }  // Execute failed: the host owns the requests

 private:
  std::vector<std::function<Error*()>> calls_, *outer_;
};

bool init_python(PyObject* module);            // false = an exception is set
void set_host_functions(PyObject* functions);  // the module host_calls.py
void log_error(Error* error);                  // logs and deletes it; null = nothing. Needs the lock.

// --- backend, model, instance -----------------------------------------------------------------------------------------

struct TRITONBACKEND_MemoryManager {};

struct TRITONBACKEND_Backend {
  std::string name, directory;
  TRITONSERVER_Message config;
  TRITONBACKEND_ExecutionPolicy policy = EXECUTION_BLOCKING;
  TRITONBACKEND_MemoryManager memory_manager;
  void* state = nullptr;
  PyObject* host = nullptr;  // borrowed: the Python object owns this one
};

struct TRITONSERVER_Server {
  PyObject* model = nullptr;  // borrowed; inferences are made in this model's name
};

struct TRITONBACKEND_Model {
  std::string name, directory;
  uint64_t version = 0;
  bool auto_complete = false;
  TRITONBACKEND_Backend* backend = nullptr;
  TRITONSERVER_Server server;
  std::set<std::string> outputs;  // of its configuration, once it is initialised
  void* state = nullptr;
  PyObject* host = nullptr;  // borrowed
};

struct TRITONBACKEND_ModelInstance {
  std::string name;
  TRITONSERVER_InstanceGroupKind kind = KIND_CPU;
  int32_t device_id = 0;
  bool is_passive = false;
  std::vector<std::string> profiles;
  std::vector<std::pair<std::string, int64_t>> secondary_devices;
  TRITONSERVER_Message host_policy;
  TRITONBACKEND_Model* model = nullptr;
  void* state = nullptr;
  PyObject* host = nullptr;  // borrowed
};

struct TRITONBACKEND_BackendAttribute {
  std::vector<std::pair<TRITONSERVER_InstanceGroupKind, uint64_t>> groups;
  bool parallel_instance_loading = false;
};

// --- requests and responses -------------------------------------------------------------------------------------------

struct TRITONBACKEND_Input : Shape {
  const void* data = nullptr;
  TRITONSERVER_BufferAttributes attributes;
  Ref owner;  // of the memory
};

struct TRITONBACKEND_Output : Shape {
  Buffer buffer;
};

struct TRITONBACKEND_State : Shape {
  Buffer buffer;
  TRITONBACKEND_Request* request = nullptr;
};

struct TRITONSERVER_InferenceTrace {
  Ref trace;  // core's RequestTrace
  std::string context;

  ~TRITONSERVER_InferenceTrace();
};

// What creates responses: core's Request until it is released, then a ResponseFactory of it if responses may still
// follow. Shared by the request, its factories and its responses, so that creating a response takes no lock.
struct Source {
  Ref request, factory;
  const TRITONBACKEND_Model* model = nullptr;  // null for a batching strategy, which makes no responses
  std::atomic<int> count{0};                   // of SourcePtr

  ~Source();
};

// A thread-safe counted pointer to a Source. (std::shared_ptr needs a symbol of glibc 2.32, too new for the wheels.)
class SourcePtr {
 public:
  SourcePtr() = default;
  static SourcePtr make() { return SourcePtr(new Source); }
  SourcePtr(const SourcePtr& other) : SourcePtr(other.source_) {}
  SourcePtr(SourcePtr&& other) noexcept : source_(std::exchange(other.source_, nullptr)) {}
  SourcePtr& operator=(SourcePtr other) noexcept {
    std::swap(source_, other.source_);
    return *this;
  }
  ~SourcePtr() {
    if (source_ && source_->count.fetch_sub(1) == 1) delete source_;
  }
  int use_count() const { return source_->count; }
  Source& operator*() const { return *source_; }
  Source* operator->() const { return source_; }

 private:
  explicit SourcePtr(Source* source) : source_(source) {
    if (source_) source_->count.fetch_add(1);
  }
  Source* source_ = nullptr;
};

struct TRITONBACKEND_Request {
  std::string id, correlation_text;
  uint64_t correlation_id = 0;
  bool has_text_correlation = false;
  uint32_t flags = 0;
  uint64_t timeout_us = 0;
  Parameters parameters;
  std::vector<TRITONBACKEND_Input> inputs;
  std::vector<std::string> outputs;
  std::vector<std::unique_ptr<TRITONBACKEND_State>> states;
  std::unique_ptr<TRITONSERVER_InferenceTrace> trace;
  SourcePtr host;
};

struct TRITONBACKEND_ResponseFactory {
  SourcePtr host;
};

struct TRITONBACKEND_Response {
  std::vector<std::unique_ptr<TRITONBACKEND_Output>> outputs;
  Parameters parameters;
  SourcePtr host;
};
