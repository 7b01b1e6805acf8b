// A backend's inferences on other models (BLS): TRITONSERVER_InferenceRequest, _ResponseAllocator,
// _InferenceResponse, and the functions of TRITONSERVER_Server that backends call.
//
// Invariants: input data is copied when the inference starts; a thread of the model (library.py) delivers the responses
// in order and calls the backend without the GIL; a request is returned to its owner after its last response, and can
// be cancelled until then.

#include <algorithm>

#include "inference.h"

namespace {

Error* no_input(const char* name) { return invalid(std::string("input '") + name + "' does not exist in request"); }

PyObject* input_list(const TRITONSERVER_InferenceRequest& request) {
  Ref list(PyList_New(0));
  for (const auto& input : request.inputs) {
    Ref name(text(input.name)), dims(shape_tuple(input.dims));
    Ref data(PyBytes_FromStringAndSize(input.bytes.data(), input.bytes.size()));
    Ref item(name && dims && data ? Py_BuildValue("(OsOO)", name.get(), datatype_name(input.datatype), dims.get(),
                                                  data.get())
                                  : nullptr);
    if (!list || !item || PyList_Append(list.get(), item.get())) return nullptr;
  }
  return list.release();
}

PyObject* output_names(const TRITONSERVER_InferenceRequest& request) {
  Ref tuple(PyTuple_New(request.outputs.size()));
  for (size_t i = 0; tuple && i < request.outputs.size(); ++i)
    if (PyTuple_SetItem(tuple.get(), i, text(request.outputs[i]))) return nullptr;
  return tuple.release();
}

PyObject* correlation(const TRITONSERVER_InferenceRequest& request) {
  return request.has_text_correlation ? text(request.correlation_text)
                                      : PyLong_FromUnsignedLongLong(request.correlation_id);
}

Delivery* new_delivery(TRITONSERVER_InferenceRequest* request) {
  auto* delivery = new Delivery;
  delivery->allocator = request->allocator;
  if (request->allocator) delivery->functions = *request->allocator;
  delivery->allocator_userp = request->allocator_userp;
  delivery->complete = request->complete;
  delivery->userp = request->complete_userp;
  delivery->request = request;
  delivery->release = request->release;
  delivery->release_userp = request->release_userp;
  return delivery;
}

void delete_delivery(PyObject* capsule) {
  delete static_cast<Delivery*>(PyCapsule_GetPointer(capsule, DELIVERY));
}

}  // namespace

// --- request ------------------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONSERVER_InferenceRequestNew(TRITONSERVER_InferenceRequest** request, TRITONSERVER_Server* server,
                                                 const char* model_name, int64_t model_version) {
  Locked lock;
  if (Error* error = call_method(server->model, "is_decoupled",  // fails for an unknown model
                                 Py_BuildValue("(sL)", model_name, static_cast<long long>(model_version))))
    return error;
  *request = new TRITONSERVER_InferenceRequest;
  (*request)->model_name = model_name;
  (*request)->model_version = model_version;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestDelete(TRITONSERVER_InferenceRequest* request) {
  Locked lock;  // it may hold a handle for cancelling
  delete request;
  return nullptr;
}

#define FIELD(GETTER, SETTER, C_TYPE, MEMBER)                                                                     \
  EXPORTED Error* TRITONSERVER_InferenceRequest##GETTER(TRITONSERVER_InferenceRequest* request, C_TYPE* value) {   \
    *value = static_cast<C_TYPE>(request->MEMBER);                                                                \
    return nullptr;                                                                                               \
  }                                                                                                               \
  EXPORTED Error* TRITONSERVER_InferenceRequest##SETTER(TRITONSERVER_InferenceRequest* request, C_TYPE value) {    \
    request->MEMBER = value;                                                                                      \
    return nullptr;                                                                                               \
  }
FIELD(Flags, SetFlags, uint32_t, flags)
FIELD(Priority, SetPriority, uint32_t, priority)
FIELD(PriorityUInt64, SetPriorityUInt64, uint64_t, priority)
FIELD(TimeoutMicroseconds, SetTimeoutMicroseconds, uint64_t, timeout_us)
#undef FIELD

EXPORTED Error* TRITONSERVER_InferenceRequestId(TRITONSERVER_InferenceRequest* request, const char** id) {
  *id = request->id.c_str();
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestSetId(TRITONSERVER_InferenceRequest* request, const char* id) {
  request->id = id;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestCorrelationId(TRITONSERVER_InferenceRequest* request, uint64_t* id) {
  if (request->has_text_correlation) return invalid("given request's correlation id is not an unsigned int");
  *id = request->correlation_id;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestCorrelationIdString(TRITONSERVER_InferenceRequest* request,
                                                                 const char** id) {
  if (!request->has_text_correlation) return invalid("given request's correlation id is not a string");
  *id = request->correlation_text.c_str();
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestSetCorrelationId(TRITONSERVER_InferenceRequest* request, uint64_t id) {
  request->correlation_id = id;
  request->has_text_correlation = false;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestSetCorrelationIdString(TRITONSERVER_InferenceRequest* request,
                                                                    const char* id) {
  constexpr size_t MAX_CORRELATION_CHARACTERS = 128;
  if (std::string(id).size() > MAX_CORRELATION_CHARACTERS)
    return invalid("string correlation ID cannot be longer than 128 characters");
  request->correlation_text = id;
  request->has_text_correlation = true;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestCancel(TRITONSERVER_InferenceRequest* request) {
  Locked lock;
  request->is_cancelled = true;
  if (!request->handle) return nullptr;
  return call_method(request->handle.get(), "cancel", PyTuple_New(0));
}

EXPORTED Error* TRITONSERVER_InferenceRequestIsCancelled(TRITONSERVER_InferenceRequest* request, bool* is_cancelled) {
  *is_cancelled = request->is_cancelled;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestAddInput(TRITONSERVER_InferenceRequest* request, const char* name,
                                                      TRITONSERVER_DataType datatype, const int64_t* shape,
                                                      uint64_t dims) {
  for (const auto& input : request->inputs)
    if (input.name == name) return invalid(std::string("input '") + name + "' already exists in request");
  InferenceInput input;
  input.name = name;
  input.datatype = datatype;
  input.dims.assign(shape, shape + dims);
  request->inputs.push_back(std::move(input));
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestRemoveInput(TRITONSERVER_InferenceRequest* request, const char* name) {
  auto found = std::find_if(request->inputs.begin(), request->inputs.end(),
                            [=](const auto& input) { return input.name == name; });
  if (found == request->inputs.end()) return no_input(name);
  request->inputs.erase(found);
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestRemoveAllInputs(TRITONSERVER_InferenceRequest* request) {
  request->inputs.clear();
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestAppendInputData(TRITONSERVER_InferenceRequest* request, const char* name,
                                                             const void* base, size_t byte_size,
                                                             TRITONSERVER_MemoryType type, int64_t) {
  if (type == MEMORY_GPU) return new_error(ERROR_UNSUPPORTED, "input data in GPU memory is not supported");
  for (auto& input : request->inputs) {
    if (input.name != name) continue;
    input.parts.emplace_back(static_cast<const char*>(base), byte_size);
    return nullptr;
  }
  return no_input(name);
}

EXPORTED Error* TRITONSERVER_InferenceRequestAppendInputDataWithHostPolicy(TRITONSERVER_InferenceRequest*, const char*,
                                                                           const void*, size_t,
                                                                           TRITONSERVER_MemoryType, int64_t,
                                                                           const char*) {
  return nullptr;  // every instance uses the data without a host policy, which a caller must add as well
}

EXPORTED Error* TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes(
    TRITONSERVER_InferenceRequest* request, const char* name, const void* base,
    TRITONSERVER_BufferAttributes* attributes) {
  return TRITONSERVER_InferenceRequestAppendInputData(request, name, base, attributes->byte_size,
                                                      attributes->memory_type, attributes->memory_type_id);
}

EXPORTED Error* TRITONSERVER_InferenceRequestRemoveAllInputData(TRITONSERVER_InferenceRequest* request,
                                                                const char* name) {
  for (auto& input : request->inputs) {
    if (input.name != name) continue;
    input.parts.clear();
    return nullptr;
  }
  return no_input(name);
}

EXPORTED Error* TRITONSERVER_InferenceRequestAddRequestedOutput(TRITONSERVER_InferenceRequest* request,
                                                                const char* name) {
  request->outputs.push_back(name);
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestRemoveRequestedOutput(TRITONSERVER_InferenceRequest* request,
                                                                   const char* name) {
  auto& outputs = request->outputs;
  outputs.erase(std::remove(outputs.begin(), outputs.end(), name), outputs.end());
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestRemoveAllRequestedOutputs(TRITONSERVER_InferenceRequest* request) {
  request->outputs.clear();
  return nullptr;
}

#define SET_PARAMETER(NAME, C_TYPE, TYPE, STORED)                                                                    \
  EXPORTED Error* TRITONSERVER_InferenceRequestSet##NAME##Parameter(TRITONSERVER_InferenceRequest* request,          \
                                                                    const char* name, C_TYPE value) {                \
    request->parameters.push_back({name, TYPE, STORED(value)});                                                      \
    return nullptr;                                                                                                  \
  }
SET_PARAMETER(String, const char*, PARAMETER_STRING, std::string)
SET_PARAMETER(Int, int64_t, PARAMETER_INT, int64_t)
SET_PARAMETER(Bool, bool, PARAMETER_BOOL, bool)
SET_PARAMETER(Double, double, PARAMETER_DOUBLE, double)
#undef SET_PARAMETER

EXPORTED Error* TRITONSERVER_InferenceRequestSetReleaseCallback(TRITONSERVER_InferenceRequest* request,
                                                                RequestReleaseFn release, void* userp) {
  request->release = release;
  request->release_userp = userp;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceRequestSetResponseCallback(TRITONSERVER_InferenceRequest* request,
                                                                 TRITONSERVER_ResponseAllocator* allocator,
                                                                 void* allocator_userp, ResponseCompleteFn complete,
                                                                 void* userp) {
  request->allocator = allocator;
  request->allocator_userp = allocator_userp;
  request->complete = complete;
  request->complete_userp = userp;
  return nullptr;
}

// --- response allocator ---------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONSERVER_ResponseAllocatorNew(TRITONSERVER_ResponseAllocator** allocator, AllocateFn allocate,
                                                  ReleaseBufferFn release, StartFn start) {
  *allocator = new TRITONSERVER_ResponseAllocator{allocate, release, start, nullptr};
  return nullptr;
}

EXPORTED Error* TRITONSERVER_ResponseAllocatorSetQueryFunction(TRITONSERVER_ResponseAllocator*, QueryFn) {
  return nullptr;  // the function is asked which kind of memory to use: here it is always CPU memory
}

EXPORTED Error* TRITONSERVER_ResponseAllocatorSetBufferAttributesFunction(TRITONSERVER_ResponseAllocator* allocator,
                                                                          BufferAttributesFn function) {
  allocator->attributes = function;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_ResponseAllocatorDelete(TRITONSERVER_ResponseAllocator* allocator) {
  delete allocator;
  return nullptr;
}

// --- the inference --------------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONSERVER_ServerInferAsync(TRITONSERVER_Server* server, TRITONSERVER_InferenceRequest* request,
                                              TRITONSERVER_InferenceTrace* trace) {
  if (!request->complete)
    return invalid("the request has no response callback: TRITONSERVER_InferenceRequestSetResponseCallback");
  std::unique_ptr<TRITONSERVER_InferenceTrace> owned_trace(trace);  // deleted even if the inference is refused
  for (auto& input : request->inputs) {
    input.bytes.clear();
    for (auto [base, byte_size] : input.parts) input.bytes.append(base, byte_size);
  }
  Locked lock;
  auto* to = new_delivery(request);
  Ref delivery(PyCapsule_New(to, DELIVERY, delete_delivery));
  {
    Ref inputs(input_list(*request)), outputs(output_names(*request)), parameters(parameter_dict(request->parameters));
    Ref id(text(request->id)), sequence(correlation(*request));
    if (!delivery || !inputs || !outputs || !parameters || !id || !sequence) return take_exception();
    Ref handle;
    Error* error = host_call(
        "infer_async",
        Py_BuildValue("(OOsLOOOOOIKKO)", server->model, delivery.get(), request->model_name.c_str(),
                      static_cast<long long>(request->model_version), id.get(), inputs.get(), outputs.get(),
                      parameters.get(), sequence.get(), request->flags,
                      static_cast<unsigned long long>(request->priority),
                      static_cast<unsigned long long>(request->timeout_us), trace ? trace->trace.get() : Py_None),
        &handle);
    if (error) return error;
    request->is_cancelled = false;
    request->handle = std::move(handle);
  }
  Unlocked unlocked;
  to->let_go();
  return nullptr;
}

namespace {

// Copies an output into memory from the caller's allocator.
Error* place(InferenceOutput* output, const char* data, Delivery& to) {
  TRITONSERVER_MemoryType type = MEMORY_CPU;
  int64_t type_id = 0;
  Error* error = to.functions.allocate(to.allocator, output->name.c_str(), output->byte_size, type, type_id,
                                       to.allocator_userp, &output->base, &output->userp, &type, &type_id);
  if (error) return error;
  output->allocator = to.allocator;
  if (output->base) output->release = to.functions.release;
  output->memory_type = type;
  output->memory_type_id = type_id;
  if (to.functions.attributes) {
    TRITONSERVER_BufferAttributes attributes{output->byte_size, type, type_id};
    error = to.functions.attributes(to.allocator, output->name.c_str(), &attributes, to.allocator_userp, output->userp);
    if (error) return error;
  }
  if (type == MEMORY_GPU) return new_error(ERROR_UNSUPPORTED, "the response allocator returned GPU memory");
  if (output->byte_size) memcpy(output->base, data, output->byte_size);
  return nullptr;
}

bool read_output(PyObject* item, TRITONSERVER_InferenceResponse* response, std::vector<Py_buffer>* views) {
  PyObject *name = nullptr, *dims = nullptr, *data = nullptr;
  const char* datatype = nullptr;
  if (!PyArg_ParseTuple(item, "OsOO", &name, &datatype, &dims, &data)) return false;
  InferenceOutput output;
  output.datatype = datatype_of(datatype);
  Py_buffer view;
  if (!read_text(name, &output.name) || !read_dims(dims, &output.dims) || PyObject_GetBuffer(data, &view, PyBUF_SIMPLE))
    return false;
  output.byte_size = view.len;
  views->push_back(view);
  response->outputs.push_back(std::move(output));
  return true;
}

}  // namespace

// deliver(delivery, response | None, flags): response = (model, version, id, outputs, parameters, error | None)
PyObject* deliver(PyObject*, PyObject* arguments) {
  PyObject *capsule = nullptr, *value = nullptr, *id = nullptr, *outputs = nullptr, *parameters = nullptr,
           *failure = nullptr;
  unsigned flags = 0;
  if (!PyArg_ParseTuple(arguments, "OOI", &capsule, &value, &flags)) return nullptr;
  auto* to = static_cast<Delivery*>(PyCapsule_GetPointer(capsule, DELIVERY));
  if (!to) return nullptr;
  std::unique_ptr<TRITONSERVER_InferenceResponse> response;
  std::vector<Py_buffer> views;
  if (value != Py_None) {
    response = std::make_unique<TRITONSERVER_InferenceResponse>();
    PyObject *model = nullptr, *message = nullptr;
    long long version = 0;
    bool ok = PyArg_ParseTuple(value, "OLOOOO", &model, &version, &id, &outputs, &parameters, &failure) &&
              read_text(model, &response->model_name) && read_text(id, &response->id) &&
              read_parameters(parameters, &response->parameters);
    response->model_version = version;
    if (ok && failure != Py_None) {
      int code = 0;
      std::string reason;
      ok = PyArg_ParseTuple(failure, "iO", &code, &message) && read_text(message, &reason);
      if (ok) response->error.reset(new_error(static_cast<TRITONSERVER_Error_Code>(code), std::move(reason)));
    }
    for (Py_ssize_t i = 0; ok && i < PyTuple_Size(outputs); ++i)
      ok = read_output(PyTuple_GetItem(outputs, i), response.get(), &views);
    if (!ok) {
      for (auto& view : views) PyBuffer_Release(&view);
      return nullptr;
    }
  }
  Error* failed_start = nullptr;
  {
    Unlocked unlocked;
    if (response && to->functions.start) failed_start = to->functions.start(to->allocator, to->allocator_userp);
    for (size_t i = 0; response && !response->error && i < response->outputs.size(); ++i)
      response->error.reset(place(&response->outputs[i], static_cast<const char*>(views[i].buf), *to));
    to->complete(response.release(), flags, to->userp);
    if (flags & RESPONSE_FINAL) to->let_go();
  }
  log_error(failed_start);  // as in Triton, the response is sent
  for (auto& view : views) PyBuffer_Release(&view);
  return Py_NewRef(Py_None);
}

// --- response -------------------------------------------------------------------------------------------------------------

TRITONSERVER_InferenceResponse::~TRITONSERVER_InferenceResponse() {
  for (auto& output : outputs)
    if (output.release)
      delete output.release(output.allocator, output.base, output.userp, output.byte_size, output.memory_type,
                            output.memory_type_id);
}

EXPORTED Error* TRITONSERVER_InferenceResponseDelete(TRITONSERVER_InferenceResponse* response) {
  delete response;
  return nullptr;
}

// A new error for each call, as in Triton's core, although its header says that the response owns it: NVIDIA's python
// backend deletes it.
EXPORTED Error* TRITONSERVER_InferenceResponseError(TRITONSERVER_InferenceResponse* response) {
  return response->error ? new TRITONSERVER_Error(*response->error) : nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceResponseModel(TRITONSERVER_InferenceResponse* response, const char** name,
                                                    int64_t* version) {
  *name = response->model_name.c_str();
  *version = response->model_version;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceResponseId(TRITONSERVER_InferenceResponse* response, const char** id) {
  *id = response->id.c_str();
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceResponseParameterCount(TRITONSERVER_InferenceResponse* response,
                                                             uint32_t* count) {
  *count = response->parameters.size();
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceResponseParameter(TRITONSERVER_InferenceResponse* response, uint32_t index,
                                                        const char** name, TRITONSERVER_ParameterType* type,
                                                        const void** value) {
  if (index >= response->parameters.size())
    return out_of_bounds(index, "response has", response->parameters.size(), "parameters");
  const auto& parameter = response->parameters[index];
  *name = parameter.name.c_str();
  *type = parameter.type;
  *value = parameter.pointer();
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceResponseOutputCount(TRITONSERVER_InferenceResponse* response, uint32_t* count) {
  *count = response->outputs.size();
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceResponseOutput(TRITONSERVER_InferenceResponse* response, uint32_t index,
                                                     const char** name, TRITONSERVER_DataType* datatype,
                                                     const int64_t** shape, uint64_t* dims, const void** base,
                                                     size_t* byte_size, TRITONSERVER_MemoryType* type,
                                                     int64_t* type_id, void** userp) {
  if (index >= response->outputs.size())
    return out_of_bounds(index, "response has", response->outputs.size(), "outputs");
  const auto& output = response->outputs[index];
  *name = output.name.c_str();
  *datatype = output.datatype;
  *shape = output.dims.data();
  *dims = output.dims.size();
  *base = output.base;
  *byte_size = output.byte_size;
  *type = output.memory_type;
  *type_id = output.memory_type_id;
  *userp = output.userp;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_InferenceResponseOutputClassificationLabel(TRITONSERVER_InferenceResponse*, uint32_t,
                                                                        size_t, const char** label) {
  *label = nullptr;  // clients ask for classes, models cannot
  return nullptr;
}
