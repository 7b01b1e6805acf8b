// Repository agents: TRITONREPOAGENT_Agent and _AgentModel, and how the host calls an agent's library.
//
// Source: Triton's tritonrepoagent.h, API 0.1.

#include "calls.h"
#include "objects.h"

enum TRITONREPOAGENT_ArtifactType { AGENT_FILESYSTEM, AGENT_REMOTE_FILESYSTEM };
enum TRITONREPOAGENT_ActionType { ACTION_LOAD };  // and the others, in the order of repoagent_api.Action

struct TRITONREPOAGENT_Agent {
  void* state = nullptr;
};

struct TRITONREPOAGENT_AgentModel {
  std::vector<std::pair<std::string, std::string>> parameters;
  std::string location, acquired;
  void* state = nullptr;
  PyObject* host = nullptr;  // borrowed: the Python object owns this one
};

namespace {

using Agent = TRITONREPOAGENT_Agent;
using AgentModel = TRITONREPOAGENT_AgentModel;

constexpr const char* AGENT = "llmbackend.Agent";
constexpr const char* AGENT_MODEL = "llmbackend.AgentModel";

Error* check_type(TRITONREPOAGENT_ArtifactType type) {
  if (type == AGENT_FILESYSTEM) return nullptr;
  return new_error(ERROR_UNSUPPORTED, "artifact type " + std::to_string(type) + " is not supported, expected 0 (a local folder)");
}

// The result of a function of the host that returns a string.
Error* read_string(const char* function, AgentModel* model, std::string* value) {
  Locked lock;
  Ref found;
  if (Error* error = host_call(function, Py_BuildValue("(O)", model->host), &found)) return error;
  return read_text(found.get(), value) ? nullptr : take_exception();
}

}  // namespace

EXPORTED Error* TRITONREPOAGENT_ApiVersion(uint32_t* major, uint32_t* minor) {
  *major = 0;
  *minor = 1;
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_State(Agent* agent, void** state) {
  *state = agent->state;
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_SetState(Agent* agent, void* state) {
  agent->state = state;
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_ModelState(AgentModel* model, void** state) {
  *state = model->state;
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_ModelSetState(AgentModel* model, void* state) {
  model->state = state;
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_ModelParameterCount(Agent*, AgentModel* model, uint32_t* count) {
  *count = model->parameters.size();
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_ModelParameter(Agent*, AgentModel* model, uint32_t index, const char** name,
                                               const char** value) {
  if (index >= model->parameters.size())
    return invalid("index out of range for model parameters: " + std::to_string(index) + ", the model has " +
                   std::to_string(model->parameters.size()));
  *name = model->parameters[index].first.c_str();
  *value = model->parameters[index].second.c_str();
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_ModelConfig(Agent*, AgentModel* model, uint32_t version, TRITONSERVER_Message** config) {
  if (version != 1)
    return new_error(ERROR_UNSUPPORTED, "model configuration version " + std::to_string(version) +
                                            " not supported, supported versions are: 1");
  std::string json;
  if (Error* error = read_string("model_config", model, &json)) return error;
  *config = new TRITONSERVER_Message{json};
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_ModelRepositoryLocation(Agent*, AgentModel* model, TRITONREPOAGENT_ArtifactType* type,
                                                        const char** location) {
  if (Error* error = read_string("agent_location", model, &model->location)) return error;
  *type = AGENT_FILESYSTEM;
  *location = model->location.c_str();
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_ModelRepositoryLocationAcquire(Agent*, AgentModel* model,
                                                               TRITONREPOAGENT_ArtifactType type,
                                                               const char** location) {
  if (Error* error = check_type(type)) return error;
  if (Error* error = read_string("acquire_agent_location", model, &model->acquired)) return error;
  *location = model->acquired.c_str();
  return nullptr;
}

EXPORTED Error* TRITONREPOAGENT_ModelRepositoryLocationRelease(Agent*, AgentModel* model, const char*) {
  Locked lock;
  return call_method(model->host, "release_location", PyTuple_New(0));
}

EXPORTED Error* TRITONREPOAGENT_ModelRepositoryUpdate(Agent*, AgentModel* model, TRITONREPOAGENT_ArtifactType type,
                                                      const char* location) {
  if (Error* error = check_type(type)) return error;
  Locked lock;
  return host_call("update_agent_location", Py_BuildValue("(Os)", model->host, location));
}

// new_agent(): the C object of an agent
PyObject* new_agent(PyObject*, PyObject*) { return hold(std::make_unique<Agent>(), AGENT); }

// new_agent_model(host, ((name, value), …))
PyObject* new_agent_model(PyObject*, PyObject* arguments) {
  PyObject *host = nullptr, *parameters = nullptr;
  if (!PyArg_ParseTuple(arguments, "OO", &host, &parameters)) return nullptr;
  auto model = std::make_unique<AgentModel>();
  model->host = host;
  for (Py_ssize_t i = 0; i < PyTuple_Size(parameters); ++i) {
    const char *name = nullptr, *value = nullptr;
    if (!PyArg_ParseTuple(PyTuple_GetItem(parameters, i), "ss", &name, &value)) return nullptr;
    model->parameters.emplace_back(name, value);
  }
  return PyErr_Occurred() ? nullptr : hold(std::move(model), AGENT_MODEL);
}

// call_agent(function address, agent, model, action | -1): ModelAction, or ModelInitialize and ModelFinalize
PyObject* call_agent(PyObject*, PyObject* arguments) {
  unsigned long long address = 0;
  PyObject *agent_capsule = nullptr, *model_capsule = nullptr;
  int action = 0;
  if (!PyArg_ParseTuple(arguments, "KOOi", &address, &agent_capsule, &model_capsule, &action)) return nullptr;
  auto* agent = held<Agent>(agent_capsule, AGENT);
  auto* model = agent ? held<AgentModel>(model_capsule, AGENT_MODEL) : nullptr;
  if (!model) return nullptr;
  Error* error = nullptr;
  {
    Unlocked unlocked;
    if (action < 0)
      error = reinterpret_cast<Error* (*)(Agent*, AgentModel*)>(address)(agent, model);
    else
      error = reinterpret_cast<Error* (*)(Agent*, AgentModel*, TRITONREPOAGENT_ActionType)>(address)(
          agent, model, static_cast<TRITONREPOAGENT_ActionType>(action));
  }
  return result_of(error);
}
