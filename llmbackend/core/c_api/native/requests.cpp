// TRITONBACKEND_Request, _Input, _Output, _State, _ResponseFactory, _Response.
//
// Invariants: the memory of an input lives until its request is released; a response is created without the GIL, which
// is taken when it is sent.

#include "objects.h"

namespace {

template <typename T>
void set(T* out, T value) {
  if (out) *out = value;
}

// Published backends continue to use a response that they have sent as an error and set to null.
Error* no_response() { return invalid("the response is null: it was sent before"); }

// The prefix of Triton's errors about a single request.
std::string tag(const TRITONBACKEND_Request* request) {
  return "[request id: " + (request->id.empty() ? "<id_unknown>" : request->id) + "] ";
}

// The Python object that creates a source's responses. Needs the GIL.
PyObject* maker_of(const Source& source) { return source.factory ? source.factory.get() : source.request.get(); }

PyObject* output_list(TRITONBACKEND_Response* response) {
  Ref list(PyList_New(0));
  for (auto& output : response->outputs) {
    if (!output->buffer.data) {
      delete output->buffer.allocate(0);
    }
    Ref name(text(output->name)), dims(shape_tuple(output->dims)), data(take_buffer(std::move(output->buffer)));
    Ref item(name && dims && data ? Py_BuildValue("(OsOO)", name.get(), datatype_name(output->datatype), dims.get(),
                                                  data.get())
                                  : nullptr);
    if (!list || !item || PyList_Append(list.get(), item.get())) return nullptr;
  }
  return list.release();
}

PyObject* send_arguments(TRITONBACKEND_Response* response, uint32_t flags, Error* error) {
  Ref outputs(output_list(response)), parameters(parameter_dict(response->parameters));
  if (!outputs || !parameters) return nullptr;
  Ref failure(Ref::borrowed(Py_None));
  if (error) {
    Ref message(text(error->message));
    failure = Ref(Py_BuildValue("(iO)", error->code, message.get()));
  }
  return Py_BuildValue("(OOOIO)", maker_of(*response->host), outputs.get(), parameters.get(), flags, failure.get());
}

}  // namespace

Source::~Source() {
  if (!request && !factory) return;
  Locked lock;
  if (factory) delete call_method(factory.get(), "close", PyTuple_New(0));
  request = Ref();
  factory = Ref();
}

// --- request ----------------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONBACKEND_RequestId(TRITONBACKEND_Request* request, const char** id) {
  *id = request->id.c_str();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestIsCancelled(TRITONBACKEND_Request* request, bool* is_cancelled) {
  Locked lock;
  Ref value(PyObject_GetAttrString(request->host->request.get(), "is_cancelled"));
  if (!value) return take_exception();
  *is_cancelled = value.get() == Py_True;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestCorrelationId(TRITONBACKEND_Request* request, uint64_t* id) {
  if (request->has_text_correlation)
    return invalid(tag(request) + "correlation ID in request is not an unsigned int");
  *id = request->correlation_id;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestCorrelationIdString(TRITONBACKEND_Request* request, const char** id) {
  if (!request->has_text_correlation) return invalid(tag(request) + "correlation ID in request is not a string");
  *id = request->correlation_text.c_str();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_InferenceRequestTimeoutMicroseconds(TRITONBACKEND_Request* request, uint64_t* timeout) {
  *timeout = request->timeout_us;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestFlags(TRITONBACKEND_Request* request, uint32_t* flags) {
  *flags = request->flags;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestParameterCount(TRITONBACKEND_Request* request, uint32_t* count) {
  *count = request->parameters.size();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestParameter(TRITONBACKEND_Request* request, uint32_t index, const char** key,
                                               TRITONSERVER_ParameterType* type, const void** value) {
  if (index >= request->parameters.size())
    return out_of_bounds(index, "request has", request->parameters.size(), "parameters");
  const auto& parameter = request->parameters[index];
  *key = parameter.name.c_str();
  *type = parameter.type;
  *value = parameter.pointer();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestInputCount(TRITONBACKEND_Request* request, uint32_t* count) {
  *count = request->inputs.size();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestInputByIndex(TRITONBACKEND_Request* request, uint32_t index,
                                                  TRITONBACKEND_Input** input) {
  *input = nullptr;
  if (index >= request->inputs.size())
    return out_of_bounds(index, "request has", request->inputs.size(), "inputs", tag(request));
  *input = &request->inputs[index];
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestInputName(TRITONBACKEND_Request* request, uint32_t index, const char** name) {
  TRITONBACKEND_Input* input = nullptr;
  *name = nullptr;
  if (Error* error = TRITONBACKEND_RequestInputByIndex(request, index, &input)) return error;
  *name = input->name.c_str();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestInput(TRITONBACKEND_Request* request, const char* name,
                                           TRITONBACKEND_Input** input) {
  *input = nullptr;
  for (auto& one : request->inputs) {
    if (one.name == name) {
      *input = &one;
      return nullptr;
    }
  }
  return invalid(tag(request) + "unknown request input name " + name);
}

EXPORTED Error* TRITONBACKEND_RequestOutputCount(TRITONBACKEND_Request* request, uint32_t* count) {
  *count = request->outputs.size();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestOutputName(TRITONBACKEND_Request* request, uint32_t index, const char** name) {
  *name = nullptr;
  if (index >= request->outputs.size())
    return out_of_bounds(index, "request has", request->outputs.size(), "requested outputs", tag(request));
  *name = request->outputs[index].c_str();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestOutputBufferProperties(TRITONBACKEND_Request*, const char*, size_t*,
                                                            TRITONSERVER_MemoryType* type, int64_t* type_id) {
  *type = MEMORY_CPU;
  *type_id = 0;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestTrace(TRITONBACKEND_Request* request, TRITONSERVER_InferenceTrace** trace) {
  *trace = request->trace.get();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_RequestRelease(TRITONBACKEND_Request* request, uint32_t flags) {
  if (flags != RELEASE_ALL && flags != RELEASE_RESCHEDULE)
    return invalid("request release flags are " + std::to_string(flags) + ", expected TRITONSERVER_REQUEST_RELEASE_ALL "
                   "or TRITONSERVER_REQUEST_RELEASE_RESCHEDULE");
  // A failed release leaves the request with the backend, so a release that can fail is not deferred.
  auto when = flags == RELEASE_ALL ? When::AFTER_EXECUTE : When::NOW;
  return with_lock(when, [=]() -> Error* {
    auto& source = *request->host;
    bool has_responses = request->host.use_count() > 1 && !source.factory;
    Ref factory;
    Error* error = host_call("release_request", Py_BuildValue("(OIO)", source.request.get(), flags,
                                                              has_responses ? Py_True : Py_False), &factory);
    if (error) return error;
    if (factory.get() != Py_None) source.factory = std::move(factory);
    source.request = Ref();
    delete request;
    return nullptr;
  });
}

// --- input ------------------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONBACKEND_InputProperties(TRITONBACKEND_Input* input, const char** name,
                                              TRITONSERVER_DataType* datatype, const int64_t** shape, uint32_t* dims,
                                              uint64_t* byte_size, uint32_t* buffer_count) {
  set(name, input->name.c_str());
  set(datatype, input->datatype);
  set(shape, static_cast<const int64_t*>(input->dims.data()));
  set(dims, static_cast<uint32_t>(input->dims.size()));
  set(byte_size, static_cast<uint64_t>(input->attributes.byte_size));
  set(buffer_count, 1u);
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_InputPropertiesForHostPolicy(TRITONBACKEND_Input* input, const char*, const char** name,
                                                           TRITONSERVER_DataType* datatype, const int64_t** shape,
                                                           uint32_t* dims, uint64_t* byte_size,
                                                           uint32_t* buffer_count) {
  return TRITONBACKEND_InputProperties(input, name, datatype, shape, dims, byte_size, buffer_count);
}

EXPORTED Error* TRITONBACKEND_InputBufferAttributes(TRITONBACKEND_Input* input, uint32_t index, const void** buffer,
                                                    TRITONSERVER_BufferAttributes** attributes) {
  *buffer = nullptr;
  *attributes = nullptr;
  if (index > 0) return out_of_bounds(index, "input '" + input->name + "' has", 1, "buffer");
  *buffer = input->data;
  *attributes = &input->attributes;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_InputBuffer(TRITONBACKEND_Input* input, uint32_t index, const void** buffer,
                                          uint64_t* byte_size, TRITONSERVER_MemoryType* type, int64_t* type_id) {
  TRITONSERVER_BufferAttributes* attributes = nullptr;
  *byte_size = 0;
  if (Error* error = TRITONBACKEND_InputBufferAttributes(input, index, buffer, &attributes)) return error;
  *byte_size = attributes->byte_size;
  *type = attributes->memory_type;
  *type_id = attributes->memory_type_id;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_InputBufferForHostPolicy(TRITONBACKEND_Input* input, const char*, uint32_t index,
                                                       const void** buffer, uint64_t* byte_size,
                                                       TRITONSERVER_MemoryType* type, int64_t* type_id) {
  return TRITONBACKEND_InputBuffer(input, index, buffer, byte_size, type, type_id);
}

// --- output and state: memory that the backend fills --------------------------------------------------------------------

namespace {

Error* fill(Buffer* owned, void** buffer, uint64_t byte_size, TRITONSERVER_MemoryType* type, int64_t* type_id) {
  if (Error* error = owned->allocate(byte_size)) return error;
  *buffer = owned->data.get();
  *type = MEMORY_CPU;
  *type_id = 0;
  return nullptr;
}

}  // namespace

EXPORTED Error* TRITONBACKEND_OutputBuffer(TRITONBACKEND_Output* output, void** buffer, uint64_t byte_size,
                                           TRITONSERVER_MemoryType* type, int64_t* type_id) {
  *buffer = nullptr;
  if (output->buffer.data)
    return new_error(ERROR_ALREADY_EXISTS, "allocated buffer for output '" + output->name + "' already exists");
  return fill(&output->buffer, buffer, byte_size, type, type_id);
}

EXPORTED Error* TRITONBACKEND_OutputBufferAttributes(TRITONBACKEND_Output* output,
                                                     TRITONSERVER_BufferAttributes** attributes) {
  *attributes = &output->buffer.attributes;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_StateNew(TRITONBACKEND_State** state, TRITONBACKEND_Request* request, const char* name,
                                       TRITONSERVER_DataType datatype, const int64_t* shape, uint32_t dims) {
  *state = nullptr;
  auto made = std::make_unique<TRITONBACKEND_State>();
  made->name = name;
  made->datatype = datatype;
  made->dims.assign(shape, shape + dims);
  made->request = request;
  Locked lock;
  Error* error = host_call("check_state", Py_BuildValue("(Os)", request->host->request.get(), name));
  if (error) return error;
  *state = made.get();
  request->states.push_back(std::move(made));
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_StateBuffer(TRITONBACKEND_State* state, void** buffer, uint64_t byte_size,
                                          TRITONSERVER_MemoryType* type, int64_t* type_id) {
  return fill(&state->buffer, buffer, byte_size, type, type_id);
}

EXPORTED Error* TRITONBACKEND_StateBufferAttributes(TRITONBACKEND_State* state,
                                                    TRITONSERVER_BufferAttributes** attributes) {
  *attributes = &state->buffer.attributes;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_StateUpdate(TRITONBACKEND_State* state) {
  if (!state->buffer.data)
    return invalid("state '" + state->name + "' has no data: TRITONBACKEND_StateBuffer was not called, or it was "
                   "updated before");
  Locked lock;
  Ref name(text(state->name)), dims(shape_tuple(state->dims)), data(take_buffer(std::move(state->buffer)));
  if (!name || !dims || !data) return take_exception();
  return host_call("update_state", Py_BuildValue("(OOsOO)", state->request->host->request.get(), name.get(),
                                                 datatype_name(state->datatype), dims.get(), data.get()));
}

// --- response factory ---------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONBACKEND_ResponseFactoryNew(TRITONBACKEND_ResponseFactory** factory,
                                                 TRITONBACKEND_Request* request) {
  Locked lock;
  auto source = SourcePtr::make();
  source->model = request->host->model;
  if (Error* error = call_method(request->host->request.get(), "response_factory", PyTuple_New(0), &source->factory))
    return error;
  *factory = new TRITONBACKEND_ResponseFactory{std::move(source)};
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ResponseFactoryDelete(TRITONBACKEND_ResponseFactory* factory) {
  delete factory;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ResponseFactoryIsCancelled(TRITONBACKEND_ResponseFactory* factory, bool* is_cancelled) {
  Locked lock;
  Ref value(PyObject_GetAttrString(factory->host->factory.get(), "is_cancelled"));
  if (!value) return take_exception();
  *is_cancelled = value.get() == Py_True;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ResponseFactorySendFlags(TRITONBACKEND_ResponseFactory* factory, uint32_t flags) {
  Locked lock;
  return host_call("send_flags", Py_BuildValue("(OI)", factory->host->factory.get(), flags));
}

// --- response -----------------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONBACKEND_ResponseNew(TRITONBACKEND_Response** response, TRITONBACKEND_Request* request) {
  *response = new TRITONBACKEND_Response{{}, {}, request->host};
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ResponseNewFromFactory(TRITONBACKEND_Response** response,
                                                     TRITONBACKEND_ResponseFactory* factory) {
  *response = new TRITONBACKEND_Response{{}, {}, factory->host};
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ResponseDelete(TRITONBACKEND_Response* response) {
  delete response;
  return nullptr;
}

#define SET_PARAMETER(NAME, C_TYPE, TYPE, STORED)                                                               \
  EXPORTED Error* TRITONBACKEND_ResponseSet##NAME##Parameter(TRITONBACKEND_Response* response, const char* name, \
                                                             C_TYPE value) {                                    \
    if (!response) return no_response();                                                                        \
    response->parameters.push_back({name, TYPE, STORED(value)});                                                \
    return nullptr;                                                                                             \
  }
SET_PARAMETER(String, const char*, PARAMETER_STRING, std::string)
SET_PARAMETER(Int, int64_t, PARAMETER_INT, int64_t)
SET_PARAMETER(Bool, bool, PARAMETER_BOOL, bool)
SET_PARAMETER(Double, double, PARAMETER_DOUBLE, double)
#undef SET_PARAMETER

EXPORTED Error* TRITONBACKEND_ResponseOutput(TRITONBACKEND_Response* response, TRITONBACKEND_Output** output,
                                             const char* name, TRITONSERVER_DataType datatype, const int64_t* shape,
                                             uint32_t dims) {
  *output = nullptr;
  if (!response) return no_response();
  const auto* model = response->host->model;
  if (model && !model->outputs.count(name))
    return invalid(std::string("unexpected inference output '") + name + "' for model '" + model->name + "'");
  auto made = std::make_unique<TRITONBACKEND_Output>();
  made->name = name;
  made->datatype = datatype;
  made->dims.assign(shape, shape + dims);
  *output = made.get();
  response->outputs.push_back(std::move(made));
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ResponseSend(TRITONBACKEND_Response* response, uint32_t flags, Error* error) {
  if (!response) return no_response();
  std::unique_ptr<TRITONBACKEND_Response> owned(response);
  Locked lock;
  return host_call("send_response", send_arguments(response, flags, error));
}

namespace {

Error* describe(const TRITONBACKEND_Output& output, const char** name, TRITONSERVER_DataType* datatype,
                const int64_t** shape, uint64_t* dims) {
  set(name, output.name.c_str());
  set(datatype, output.datatype);
  set(shape, static_cast<const int64_t*>(output.dims.data()));
  set(dims, static_cast<uint64_t>(output.dims.size()));
  return nullptr;
}

}  // namespace

EXPORTED Error* TRITONBACKEND_InferenceResponseOutput(TRITONBACKEND_Response* response, uint32_t index,
                                                      const char** name, TRITONSERVER_DataType* datatype,
                                                      const int64_t** shape, uint64_t* dims) {
  if (index >= response->outputs.size())
    return out_of_bounds(index, "response has", response->outputs.size(), "outputs");
  return describe(*response->outputs[index], name, datatype, shape, dims);
}

EXPORTED Error* TRITONBACKEND_InferenceResponseOutputByName(TRITONBACKEND_Response* response, const char* name,
                                                            TRITONSERVER_DataType* datatype, const int64_t** shape,
                                                            uint64_t* dims) {
  for (auto& output : response->outputs)
    if (output->name == name) return describe(*output, nullptr, datatype, shape, dims);
  return new_error(ERROR_NOT_FOUND, std::string("Output name ") + name + "not found.");  // Triton's words
}
