// Does what its input, one string, says:
//   "echo"    answers with the process's id
//   "crash"   ends the process within Execute, after a response where the model is decoupled
//   "hold"    owns the request, and answers with an error when it is cancelled
//   "orphan"  kills the process that the instance has started, and owns the request for ever
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "backend.h"

namespace {

pid_t child = 0;

Error* answer(TRITONBACKEND_Request* request, const std::string& text, uint32_t flags) {
  TRITONBACKEND_Response* response;
  TRY(TRITONBACKEND_ResponseNew(&response, request));
  uint32_t length = text.size();
  std::string data(reinterpret_cast<char*>(&length), sizeof length);
  data += text;
  const int64_t shape[] = {1};
  TRY(add_output(response, "OUTPUT0", TYPE_BYTES, shape, 1, data.data(), data.size()));
  return TRITONBACKEND_ResponseSend(response, flags, nullptr);
}

void hold(TRITONBACKEND_Request* request) {
  bool is_cancelled = false;
  while (!is_cancelled) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    TRITONBACKEND_RequestIsCancelled(request, &is_cancelled);
  }
  TRITONBACKEND_Response* response;
  TRITONBACKEND_ResponseNew(&response, request);
  Error* error = TRITONSERVER_ErrorNew(ERROR_CANCELLED, "cancelled while it was held");
  TRITONBACKEND_ResponseSend(response, RESPONSE_FINAL, error);
  TRITONSERVER_ErrorDelete(error);
  TRITONBACKEND_RequestRelease(request, RELEASE_ALL);
}

Error* execute(TRITONBACKEND_Request* request) {
  TRITONBACKEND_Input* input;
  const char* data;
  uint64_t byte_size;
  TRY(TRITONBACKEND_RequestInput(request, "INPUT0", &input));
  TRY(read_input(input, &data, &byte_size));
  std::string command(data + 4, byte_size - 4);
  if (command == "hold") {
    std::thread(hold, request).detach();
    return nullptr;
  }
  if (command == "orphan") {
    kill(child, SIGKILL);
    return nullptr;
  }
  if (command == "crash") {
    TRY(answer(request, "soon", 0));
    _exit(7);
  }
  TRY(answer(request, std::to_string(getpid()), RESPONSE_FINAL));
  return TRITONBACKEND_RequestRelease(request, RELEASE_ALL);
}

}  // namespace

EXPORTED Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance*) {
  char name[] = "sleep", seconds[] = "600";
  char* const arguments[] = {name, seconds, nullptr};
  posix_spawnp(&child, name, nullptr, nullptr, arguments, environ);
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance*) {
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance*, TRITONBACKEND_Request** requests,
                                                   const uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) TRY(execute(requests[i]));
  return nullptr;
}
