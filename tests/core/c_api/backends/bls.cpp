// Inferences on other models. Its input, one string, says what to do; the answer shows what came of it:
//   "infer MODEL TEXT"      MODEL's responses to TEXT
//   "cancel MODEL TEXT"     the same, cancelled when the first response has come
//   "steps MODEL TEXT"      three inferences of one sequence
//   "request MODEL"         the functions of a request for MODEL, right and wrong
//   "models MODEL"          loads and unloads MODEL
#include <condition_variable>
#include <mutex>
#include <vector>

#include "functions.h"

namespace {

// What an inference gave; shared with the host's threads until the request is released.
class Inference {
 public:
  Inference(TRITONSERVER_Server* server, const std::string& model) : server_(server), model_(model) {
    TRITONSERVER_ResponseAllocatorNew(&allocator_, allocate, release_buffer, start);
    TRITONSERVER_ResponseAllocatorSetQueryFunction(allocator_, query);
    TRITONSERVER_ResponseAllocatorSetBufferAttributesFunction(allocator_, set_attributes);
  }
  ~Inference() { TRITONSERVER_ResponseAllocatorDelete(allocator_); }

  Error* prepare(const std::string& text) {
    TRY(TRITONSERVER_InferenceRequestNew(&request, server_, model_.c_str(), -1));
    const int64_t shape[] = {1};
    data_ = serialized(text);
    TRY(TRITONSERVER_InferenceRequestSetId(request, "inner"));
    TRY(TRITONSERVER_InferenceRequestAddInput(request, "INPUT0", TYPE_BYTES, shape, 1));
    // In two pieces, as a caller may have them.
    TRY(TRITONSERVER_InferenceRequestAppendInputData(request, "INPUT0", data_.data(), 4, MEMORY_CPU, 0));
    TRY(TRITONSERVER_InferenceRequestAppendInputData(request, "INPUT0", data_.data() + 4, data_.size() - 4, MEMORY_CPU,
                                                     0));
    TRY(TRITONSERVER_InferenceRequestAddRequestedOutput(request, "OUTPUT0"));
    TRY(TRITONSERVER_InferenceRequestSetIntParameter(request, "hops", 1));
    TRY(TRITONSERVER_InferenceRequestSetTimeoutMicroseconds(request, 60'000'000));
    TRY(TRITONSERVER_InferenceRequestSetReleaseCallback(request, released, this));
    return TRITONSERVER_InferenceRequestSetResponseCallback(request, allocator_, this, completed, this);
  }

  // An inference that is refused leaves the request with its owner.
  Error* run(TRITONSERVER_InferenceTrace* trace = nullptr) {
    Error* error = TRITONSERVER_ServerInferAsync(server_, request, trace);
    if (error) TRITONSERVER_InferenceRequestDelete(request);
    return error;
  }

  void wait_for_first() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return responses_ > 0; });
  }

  // Until the last response has come and the request is released.
  const std::string& wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return is_released_ && is_final_; });
    return text_;
  }

  TRITONSERVER_InferenceRequest* request = nullptr;

 private:
  static Error* allocate(TRITONSERVER_ResponseAllocator* allocator, const char* name, size_t byte_size,
                         TRITONSERVER_MemoryType, int64_t, void* userp, void** buffer, void** buffer_userp,
                         TRITONSERVER_MemoryType* type, int64_t* type_id) {
    auto* self = static_cast<Inference*>(userp);
    if (allocator != self->allocator_ || self->starts_ == 0)
      return TRITONSERVER_ErrorNew(ERROR_INTERNAL, "called with another allocator, or before it was started");
    if (self->model_ == "full")  // as an allocator without memory
      return TRITONSERVER_ErrorNew(ERROR_UNAVAILABLE, (std::string("no memory for ") + name).c_str());
    *buffer = malloc(byte_size);
    *buffer_userp = self;
    *type = MEMORY_CPU;
    *type_id = 0;
    return nullptr;
  }

  static Error* release_buffer(TRITONSERVER_ResponseAllocator* allocator, void* buffer, void* buffer_userp, size_t,
                               TRITONSERVER_MemoryType, int64_t) {
    if (allocator == static_cast<Inference*>(buffer_userp)->allocator_) free(buffer);
    return nullptr;
  }

  static Error* start(TRITONSERVER_ResponseAllocator*, void* userp) {
    ++static_cast<Inference*>(userp)->starts_;
    return nullptr;
  }

  static Error* query(TRITONSERVER_ResponseAllocator*, void*, const char*, size_t*, TRITONSERVER_MemoryType* type,
                      int64_t* type_id) {
    *type = MEMORY_CPU;
    *type_id = 0;
    return nullptr;
  }

  static Error* set_attributes(TRITONSERVER_ResponseAllocator*, const char*, TRITONSERVER_BufferAttributes* attributes,
                               void*, void*) {
    size_t byte_size;
    return TRITONSERVER_BufferAttributesByteSize(attributes, &byte_size);
  }

  static void released(TRITONSERVER_InferenceRequest* request, uint32_t, void* userp) {
    auto* self = static_cast<Inference*>(userp);
    TRITONSERVER_InferenceRequestDelete(request);
    std::lock_guard lock(self->mutex_);
    self->is_released_ = true;
    self->changed_.notify_all();
  }

  static void completed(TRITONSERVER_InferenceResponse* response, uint32_t flags, void* userp) {
    auto* self = static_cast<Inference*>(userp);
    std::string shown = response ? self->read(response) : "none";
    std::lock_guard lock(self->mutex_);
    ++self->responses_;
    self->text_ += shown + (flags & RESPONSE_FINAL ? "." : ",");
    self->is_final_ = flags & RESPONSE_FINAL;
    self->changed_.notify_all();
  }

  static std::string read(TRITONSERVER_InferenceResponse* response) {
    std::string text;
    Error* error = TRITONSERVER_InferenceResponseError(response);
    if (error)
      text = "error " + Report::shown(error);
    else
      text = outputs_of(response);
    TRITONSERVER_InferenceResponseDelete(response);
    return text;
  }

  static std::string outputs_of(TRITONSERVER_InferenceResponse* response) {
    uint32_t count = 0;
    const char *name, *label = "";
    TRITONSERVER_DataType datatype;
    TRITONSERVER_ParameterType type;
    const int64_t* shape;
    uint64_t dims;
    const void *base = nullptr, *value;
    size_t byte_size = 0;
    TRITONSERVER_MemoryType memory;
    int64_t id, version;
    void* userp;
    std::string text;
    TRITONSERVER_InferenceResponseOutputCount(response, &count);
    for (uint32_t i = 0; i < count; ++i) {
      TRITONSERVER_InferenceResponseOutput(response, i, &name, &datatype, &shape, &dims, &base, &byte_size, &memory,
                                           &id, &userp);
      if (byte_size > 4) text.append(static_cast<const char*>(base) + 4, byte_size - 4);
    }
    TRITONSERVER_InferenceResponseParameterCount(response, &count);
    for (uint32_t i = 0; i < count; ++i) {
      TRITONSERVER_InferenceResponseParameter(response, i, &name, &type, &value);
      text += std::string(" ") + name;
      if (type == PARAMETER_INT) text += std::to_string(*static_cast<const int64_t*>(value));
    }
    TRITONSERVER_InferenceResponseModel(response, &name, &version);
    text += std::string(" by ") + name + std::to_string(version);
    TRITONSERVER_InferenceResponseId(response, &name);
    TRITONSERVER_InferenceResponseOutputClassificationLabel(response, 0, 0, &label);
    Error* beyond = TRITONSERVER_InferenceResponseParameter(response, 99, &name, &type, &value);
    if (label || !beyond) text += " wrong";
    if (beyond) TRITONSERVER_ErrorDelete(beyond);
    return text;
  }

  TRITONSERVER_Server* server_;
  std::string model_, data_, text_;
  TRITONSERVER_ResponseAllocator* allocator_ = nullptr;
  int starts_ = 0, responses_ = 0;
  bool is_released_ = false, is_final_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
};

void infer(TRITONSERVER_Server* server, const std::string& model, const std::string& text, Report& report) {
  Inference inference(server, model);
  Error* error = inference.prepare(text);
  if (!error) error = inference.run();
  if (error) return report.call("refused", error);
  report.value(model, inference.wait());
}

void cancel(TRITONSERVER_Server* server, const std::string& model, const std::string& text, Report& report) {
  Inference inference(server, model);
  Error* error = inference.prepare(text);
  if (error) return report.call("refused", error);
  bool is_cancelled = true;
  report.call("Cancel before", TRITONSERVER_InferenceRequestCancel(inference.request));
  if ((error = inference.run())) return report.call("refused", error);
  inference.wait_for_first();
  VALUE("IsCancelled", TRITONSERVER_InferenceRequestIsCancelled(inference.request, &is_cancelled), is_cancelled);
  report.call("Cancel", TRITONSERVER_InferenceRequestCancel(inference.request));
  const std::string& responses = inference.wait();
  report.value("last", responses.substr(responses.rfind(',') + 1));
}

// A sequence of three inferences, by a text as its id.
void steps(TRITONSERVER_Server* server, const std::string& model, const std::string& text, Report& report) {
  for (uint32_t flags : {1u, 0u, 2u}) {
    Inference inference(server, model);
    Error* error = inference.prepare(text);
    if (!error) error = TRITONSERVER_InferenceRequestSetCorrelationIdString(inference.request, "sequence");
    if (!error) error = TRITONSERVER_InferenceRequestSetFlags(inference.request, flags);
    if (!error) error = inference.run();
    if (error) return report.call("refused", error);
    report.value("step", inference.wait());
  }
}

void request(TRITONSERVER_Server* server, const std::string& model, Report& report) {
  TRITONSERVER_InferenceRequest *request, *none;
  TRITONSERVER_BufferAttributes* gpu;
  const char* text = "";
  uint32_t small;
  uint64_t number;
  bool flag;
  const int64_t shape[] = {1};
  report.call("New for nobody", TRITONSERVER_InferenceRequestNew(&none, server, "nobody", -1));
  report.call("New for version 9", TRITONSERVER_InferenceRequestNew(&none, server, model.c_str(), 9));
  report.call("New", TRITONSERVER_InferenceRequestNew(&request, server, model.c_str(), 1));
  report.call("SetId", TRITONSERVER_InferenceRequestSetId(request, "id"));
  VALUE("Id", TRITONSERVER_InferenceRequestId(request, &text), text);
  report.call("SetFlags", TRITONSERVER_InferenceRequestSetFlags(request, 3));
  VALUE("Flags", TRITONSERVER_InferenceRequestFlags(request, &small), small);
  report.call("SetPriority", TRITONSERVER_InferenceRequestSetPriority(request, 4));
  VALUE("Priority", TRITONSERVER_InferenceRequestPriority(request, &small), small);
  report.call("SetPriorityUInt64", TRITONSERVER_InferenceRequestSetPriorityUInt64(request, 1ull << 40));
  VALUE("PriorityUInt64", TRITONSERVER_InferenceRequestPriorityUInt64(request, &number), number);
  report.call("SetTimeout", TRITONSERVER_InferenceRequestSetTimeoutMicroseconds(request, 5000));
  VALUE("Timeout", TRITONSERVER_InferenceRequestTimeoutMicroseconds(request, &number), number);
  report.call("SetCorrelationId", TRITONSERVER_InferenceRequestSetCorrelationId(request, ~0ull));
  VALUE("CorrelationId", TRITONSERVER_InferenceRequestCorrelationId(request, &number), number);
  VALUE("CorrelationIdString of a number", TRITONSERVER_InferenceRequestCorrelationIdString(request, &text), text);
  report.call("SetCorrelationIdString", TRITONSERVER_InferenceRequestSetCorrelationIdString(request, "s"));
  VALUE("CorrelationIdString", TRITONSERVER_InferenceRequestCorrelationIdString(request, &text), text);
  VALUE("CorrelationId of a text", TRITONSERVER_InferenceRequestCorrelationId(request, &number), number);
  report.call("SetCorrelationIdString of 129",
              TRITONSERVER_InferenceRequestSetCorrelationIdString(request, std::string(129, 'a').c_str()));
  VALUE("IsCancelled", TRITONSERVER_InferenceRequestIsCancelled(request, &flag), flag);
  report.call("AddInput", TRITONSERVER_InferenceRequestAddInput(request, "INPUT0", TYPE_BYTES, shape, 1));
  report.call("AddInput again", TRITONSERVER_InferenceRequestAddInput(request, "INPUT0", TYPE_BYTES, shape, 1));
  report.call("RemoveInput X", TRITONSERVER_InferenceRequestRemoveInput(request, "X"));
  report.call("AppendInputData of X",
              TRITONSERVER_InferenceRequestAppendInputData(request, "X", text, 1, MEMORY_CPU, 0));
  report.call("AppendInputData of a GPU",
              TRITONSERVER_InferenceRequestAppendInputData(request, "INPUT0", text, 1, MEMORY_GPU, 0));
  report.call("AppendInputDataWithHostPolicy",
              TRITONSERVER_InferenceRequestAppendInputDataWithHostPolicy(request, "INPUT0", text, 1, MEMORY_CPU, 0,
                                                                         "cpu"));
  TRITONSERVER_BufferAttributesNew(&gpu);
  report.call("AppendInputDataWithBufferAttributes",
              TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes(request, "INPUT0", text, gpu));
  TRITONSERVER_BufferAttributesDelete(gpu);
  report.call("RemoveAllInputData", TRITONSERVER_InferenceRequestRemoveAllInputData(request, "INPUT0"));
  report.call("RemoveAllInputData of X", TRITONSERVER_InferenceRequestRemoveAllInputData(request, "X"));
  report.call("RemoveInput", TRITONSERVER_InferenceRequestRemoveInput(request, "INPUT0"));
  report.call("RemoveAllInputs", TRITONSERVER_InferenceRequestRemoveAllInputs(request));
  report.call("AddRequestedOutput", TRITONSERVER_InferenceRequestAddRequestedOutput(request, "OUTPUT0"));
  report.call("RemoveRequestedOutput", TRITONSERVER_InferenceRequestRemoveRequestedOutput(request, "OUTPUT0"));
  report.call("RemoveAllRequestedOutputs", TRITONSERVER_InferenceRequestRemoveAllRequestedOutputs(request));
  report.call("SetStringParameter", TRITONSERVER_InferenceRequestSetStringParameter(request, "s", "text"));
  report.call("SetIntParameter", TRITONSERVER_InferenceRequestSetIntParameter(request, "i", 1));
  report.call("SetBoolParameter", TRITONSERVER_InferenceRequestSetBoolParameter(request, "b", false));
  report.call("SetDoubleParameter", TRITONSERVER_InferenceRequestSetDoubleParameter(request, "d", 0.5));
  report.call("InferAsync without callbacks", TRITONSERVER_ServerInferAsync(server, request, nullptr));
  report.call("Delete", TRITONSERVER_InferenceRequestDelete(request));
  Inference unfit(server, model);
  report.call("a request", unfit.prepare("text"));
  TRITONSERVER_InferenceRequestSetFlags(unfit.request, 0);
  TRITONSERVER_InferenceRequestRemoveAllInputs(unfit.request);
  report.call("InferAsync without its input", unfit.run());
}

void models(TRITONSERVER_Server* server, const std::string& model, Report& report) {
  bool flag = false;
  uint32_t properties = 0;
  auto is_ready = [&](const char* label) {
    VALUE(label, TRITONSERVER_ServerModelIsReady(server, model.c_str(), -1, &flag), flag);
  };
  std::string config = "{\"backend\":\"scripted\",\"model_transaction_policy\":{\"decoupled\":true},"
                       "\"input\":[{\"name\":\"INPUT0\",\"data_type\":\"TYPE_STRING\",\"dims\":[1]}],"
                       "\"output\":[{\"name\":\"OUTPUT0\",\"data_type\":\"TYPE_STRING\",\"dims\":[1]}]}";
  auto* parameter = TRITONSERVER_ParameterNew("config", PARAMETER_STRING, config.c_str());
  auto* file = TRITONSERVER_ParameterBytesNew("file:1/note.txt", "text", 4);
  const TRITONSERVER_Parameter* parameters[] = {parameter, file};
  VALUE("IsLive", TRITONSERVER_ServerIsLive(server, &flag), flag);
  is_ready("IsReady");
  report.call("Load", TRITONSERVER_ServerLoadModel(server, model.c_str()));
  is_ready("IsReady when it is loaded");
  VALUE("TransactionProperties",
        TRITONSERVER_ServerModelTransactionProperties(server, model.c_str(), -1, &properties, nullptr), properties);
  report.call("LoadModelWithParameters",
              TRITONSERVER_ServerLoadModelWithParameters(server, model.c_str(), parameters, 2));
  VALUE("TransactionProperties then",
        TRITONSERVER_ServerModelTransactionProperties(server, model.c_str(), -1, &properties, nullptr), properties);
  report.call("Unload", TRITONSERVER_ServerUnloadModel(server, model.c_str()));
  report.call("UnloadModelAndDependents", TRITONSERVER_ServerUnloadModelAndDependents(server, model.c_str()));
  report.call("Load of nobody", TRITONSERVER_ServerLoadModel(server, "nobody"));
  VALUE("IsReady of nobody", TRITONSERVER_ServerModelIsReady(server, "nobody", -1, &flag), flag);
  report.call("TransactionProperties of nobody",
              TRITONSERVER_ServerModelTransactionProperties(server, "nobody", -1, &properties, nullptr));
  TRITONSERVER_ParameterDelete(parameter);
  TRITONSERVER_ParameterDelete(file);
}

Error* answer(TRITONBACKEND_Model* model, TRITONBACKEND_Request* request_) {
  std::string command, verb, other, text;
  TRITONSERVER_Server* server;
  TRY(TRITONBACKEND_ModelServer(model, &server));
  TRY(command_of(request_, &command));
  std::istringstream words(command);
  words >> verb >> other >> std::ws;
  std::getline(words, text);
  Report report;
  if (verb == "infer") infer(server, other, text, report);
  if (verb == "cancel") cancel(server, other, text, report);
  if (verb == "steps") steps(server, other, text, report);
  if (verb == "request") request(server, other, report);
  if (verb == "models") models(server, other, report);
  return answer_with_text(request_, report.text());
}

}  // namespace

EXPORTED Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                   TRITONBACKEND_Request** requests, uint32_t count) {
  TRITONBACKEND_Model* model;
  TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
  for (uint32_t i = 0; i < count; ++i) TRY(answer(model, requests[i]));
  return nullptr;
}
