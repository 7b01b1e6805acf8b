// A repository agent that brings a model's files from the folder in its parameter `from`, and refuses a model without
// it. Appends each action, by number, to the file in the parameter `log`.
#include <filesystem>
#include <fstream>
#include <string>

#include "backend.h"

struct TRITONREPOAGENT_Agent;
struct TRITONREPOAGENT_AgentModel;
using Agent = TRITONREPOAGENT_Agent;
using AgentModel = TRITONREPOAGENT_AgentModel;

IMPORTED Error* TRITONREPOAGENT_ApiVersion(uint32_t*, uint32_t*);
IMPORTED Error* TRITONREPOAGENT_SetState(Agent*, void*);
IMPORTED Error* TRITONREPOAGENT_State(Agent*, void**);
IMPORTED Error* TRITONREPOAGENT_ModelSetState(AgentModel*, void*);
IMPORTED Error* TRITONREPOAGENT_ModelState(AgentModel*, void**);
IMPORTED Error* TRITONREPOAGENT_ModelParameterCount(Agent*, AgentModel*, uint32_t*);
IMPORTED Error* TRITONREPOAGENT_ModelParameter(Agent*, AgentModel*, uint32_t, const char**, const char**);
IMPORTED Error* TRITONREPOAGENT_ModelConfig(Agent*, AgentModel*, uint32_t, TRITONSERVER_Message**);
IMPORTED Error* TRITONREPOAGENT_ModelRepositoryLocation(Agent*, AgentModel*, int*, const char**);
IMPORTED Error* TRITONREPOAGENT_ModelRepositoryLocationAcquire(Agent*, AgentModel*, int, const char**);
IMPORTED Error* TRITONREPOAGENT_ModelRepositoryLocationRelease(Agent*, AgentModel*, const char*);
IMPORTED Error* TRITONREPOAGENT_ModelRepositoryUpdate(Agent*, AgentModel*, int, const char*);

namespace {

enum { LOAD, LOAD_COMPLETE, LOAD_FAIL, UNLOAD, UNLOAD_COMPLETE };

struct ModelState {
  std::string from, log;
};

Error* fetch(Agent* agent, AgentModel* model, const std::string& from) {
  int type;
  const char *location, *place, *json;
  size_t byte_size;
  TRITONSERVER_Message* config;
  TRY(TRITONREPOAGENT_ModelConfig(agent, model, 1, &config));
  TRY(TRITONSERVER_MessageSerializeToJson(config, &json, &byte_size));
  bool names_agent = std::string(json, byte_size).find("model_repository_agents") != std::string::npos;
  TRY(TRITONSERVER_MessageDelete(config));
  if (!names_agent) return TRITONSERVER_ErrorNew(ERROR_INTERNAL, "the configuration does not name the agent");
  TRY(TRITONREPOAGENT_ModelRepositoryLocation(agent, model, &type, &location));
  TRY(TRITONREPOAGENT_ModelRepositoryLocationAcquire(agent, model, 0, &place));
  TRY(TRITONREPOAGENT_ModelRepositoryLocationRelease(agent, model, place));
  TRY(TRITONREPOAGENT_ModelRepositoryLocationAcquire(agent, model, 0, &place));
  std::error_code failed;
  std::filesystem::copy(std::filesystem::path(location) / "config.pbtxt", place, failed);
  std::filesystem::copy(from, place, std::filesystem::copy_options::recursive, failed);
  return TRITONREPOAGENT_ModelRepositoryUpdate(agent, model, 0, place);
}

}  // namespace

EXPORTED Error* TRITONREPOAGENT_Initialize(Agent* agent) {
  uint32_t major, minor;
  TRY(TRITONREPOAGENT_ApiVersion(&major, &minor));
  if (major != 0 || minor < 1) return TRITONSERVER_ErrorNew(ERROR_UNSUPPORTED, "API 0.1 is expected");
  return TRITONREPOAGENT_SetState(agent, new int(0));
}

EXPORTED Error* TRITONREPOAGENT_Finalize(Agent* agent) {
  void* state;
  TRY(TRITONREPOAGENT_State(agent, &state));
  delete static_cast<int*>(state);
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_ModelInitialize(Agent* agent, AgentModel* model) {
  auto* state = new ModelState;
  TRY(TRITONREPOAGENT_ModelSetState(model, state));
  uint32_t count;
  TRY(TRITONREPOAGENT_ModelParameterCount(agent, model, &count));
  for (uint32_t i = 0; i < count; ++i) {
    const char *name, *value;
    TRY(TRITONREPOAGENT_ModelParameter(agent, model, i, &name, &value));
    (std::string(name) == "from" ? state->from : state->log) = value;
  }
  const char *name, *value;
  Error* expected = TRITONREPOAGENT_ModelParameter(agent, model, count, &name, &value);
  if (!expected) return TRITONSERVER_ErrorNew(ERROR_INTERNAL, "a parameter beyond the last one was found");
  TRITONSERVER_ErrorDelete(expected);
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_ModelFinalize(Agent*, AgentModel* model) {
  void* state;
  TRY(TRITONREPOAGENT_ModelState(model, &state));
  delete static_cast<ModelState*>(state);
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_ModelAction(Agent* agent, AgentModel* model, int action) {
  void* state;
  TRY(TRITONREPOAGENT_ModelState(model, &state));
  auto* own = static_cast<ModelState*>(state);
  std::ofstream(own->log, std::ios::app) << action;
  if (action != LOAD) return nullptr;
  if (own->from.empty()) return TRITONSERVER_ErrorNew(ERROR_INVALID_ARG, "parameter 'from' is expected");
  return fetch(agent, model, own->from);
}
