// A decoupled model's ways to answer. Its input, one string, says which, on a thread that Execute does not wait for;
// the request is released at once.
//   "empty N"       N responses without outputs
//   "parameters N"  N responses with a parameter of each type
//   "after"         a response, FINAL, then a response, FINAL again, and the results of these calls in the log
//   "lost"          a response, then the factory is deleted without FINAL
//   "deleted"       a response is made and deleted, another is sent
//   "two"           two factories take turns; the second one sends FINAL after the first one is deleted
//   "mixed"         a response that was made of the request, then the factory's
//   "errors"        a response, an error without FINAL, an error with FINAL
//   "unfit"         an output with fewer bytes than its shape has, then a response
//   "wait"          a response, and an error once the request is cancelled
#include <list>
#include <mutex>
#include <thread>

#include "functions.h"

namespace {

using Factory = std::unique_ptr<TRITONBACKEND_ResponseFactory, Error* (*)(TRITONBACKEND_ResponseFactory*)>;

void log_if(const char* what, Error* error) {
  std::string text = std::string(what) + ": " + Report::shown(error);
  error = TRITONSERVER_LogMessage(LOG_INFO, "streams.cpp", 1, text.c_str());
  if (error) TRITONSERVER_ErrorDelete(error);
}

struct Stream {
  Factory first, second;
  TRITONBACKEND_Response* own;  // made of the request
  std::string verb;
  int count;

  TRITONBACKEND_Response* response(Factory& factory) {
    TRITONBACKEND_Response* made = nullptr;
    TRITONBACKEND_ResponseNewFromFactory(&made, factory.get());
    return made;
  }

  void send(Factory& factory, const std::string& text, uint32_t flags = 0, const char* error_text = nullptr) {
    auto* made = response(factory);
    Error* error = error_text ? TRITONSERVER_ErrorNew(ERROR_UNAVAILABLE, error_text) : nullptr;
    if (!error) add_text(made, text);
    log_if(text.c_str(), TRITONBACKEND_ResponseSend(made, flags, error));
    if (error) TRITONSERVER_ErrorDelete(error);
  }

  void final(Factory& factory) {
    log_if("FINAL", TRITONBACKEND_ResponseFactorySendFlags(factory.get(), RESPONSE_FINAL));
  }

  void run() {
    if (verb != "mixed") TRITONBACKEND_ResponseDelete(own);
    if (verb != "two") second.reset();
    for (int i = 0; i < count; ++i) {
      auto* made = response(first);
      if (verb == "parameters") {
        TRITONBACKEND_ResponseSetIntParameter(made, "i", i);
        TRITONBACKEND_ResponseSetBoolParameter(made, "b", i % 2);
        TRITONBACKEND_ResponseSetDoubleParameter(made, "d", i + 0.5);
        TRITONBACKEND_ResponseSetStringParameter(made, "s", std::to_string(i).c_str());
      }
      TRITONBACKEND_ResponseSend(made, 0, nullptr);
    }
    if (verb == "after") {
      send(first, "before", 0);
      final(first);
      send(first, "late", 0);
    }
    if (verb == "lost") {
      send(first, "only");
      return first.reset();
    }
    if (verb == "deleted") {
      TRITONBACKEND_ResponseDelete(response(first));
      send(first, "other");
    }
    if (verb == "two") {
      for (const char* text : {"a", "b"}) send(first, text), send(second, text);
      first.reset();
      return final(second);
    }
    if (verb == "mixed") {
      add_text(own, "own");
      TRITONBACKEND_ResponseSend(own, 0, nullptr);
      send(first, "factory's");
    }
    if (verb == "errors") {
      send(first, "good");
      send(first, "", 0, "a hitch");
      return send(first, "", RESPONSE_FINAL, "the end");
    }
    if (verb == "unfit") {
      auto* made = response(first);
      const int64_t shape[] = {1};
      add_output(made, "OUTPUT0", TYPE_BYTES, shape, 1, "\5", 1);
      log_if("unfit", TRITONBACKEND_ResponseSend(made, 0, nullptr));
      send(first, "fit");
    }
    if (verb == "wait") {
      bool is_cancelled = false;
      send(first, "waiting");
      while (!is_cancelled) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        TRITONBACKEND_ResponseFactoryIsCancelled(first.get(), &is_cancelled);
      }
      return send(first, "", RESPONSE_FINAL, "stopped when it was cancelled");
    }
    final(first);
  }
};

struct Threads {
  std::mutex mutex;
  std::list<std::thread> list;
};

}  // namespace

EXPORTED Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return TRITONBACKEND_ModelSetState(model, new Threads);
}

EXPORTED Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  void* state;
  TRY(TRITONBACKEND_ModelState(model, &state));
  std::unique_ptr<Threads> threads(static_cast<Threads*>(state));
  for (auto& thread : threads->list) thread.join();
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                   TRITONBACKEND_Request** requests, uint32_t count) {
  TRITONBACKEND_Model* model;
  void* state;
  TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
  TRY(TRITONBACKEND_ModelState(model, &state));
  auto* threads = static_cast<Threads*>(state);
  for (uint32_t i = 0; i < count; ++i) {
    std::string command;
    TRY(command_of(requests[i], &command));
    std::istringstream words(command);
    TRITONBACKEND_ResponseFactory *first, *second;
    TRY(TRITONBACKEND_ResponseFactoryNew(&first, requests[i]));
    TRY(TRITONBACKEND_ResponseFactoryNew(&second, requests[i]));
    auto stream = std::make_unique<Stream>(Factory(first, TRITONBACKEND_ResponseFactoryDelete),
                                           Factory(second, TRITONBACKEND_ResponseFactoryDelete), nullptr, "", 0);
    TRY(TRITONBACKEND_ResponseNew(&stream->own, requests[i]));
    words >> stream->verb >> stream->count;
    std::lock_guard lock(threads->mutex);
    threads->list.emplace_back([stream = std::move(stream)] { stream->run(); });
    TRY(TRITONBACKEND_RequestRelease(requests[i], RELEASE_ALL));
  }
  return nullptr;
}
