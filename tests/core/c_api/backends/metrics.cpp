// Metrics of a backend. Its input, one string, says what to do; the answer shows what each call gave:
//   "make"      a counter, a gauge and a histogram, and values in them
//   "change"    counts once more, in the metric that "make" made and in one of the same labels
//   "wrong"     calls that must fail
//   "delete"    deletes one of the counter's metrics
#include <vector>

#include "functions.h"

namespace {

struct Families {
  TRITONSERVER_MetricFamily *counter = nullptr, *gauge = nullptr, *histogram = nullptr;
  std::vector<TRITONSERVER_Metric*> counters;  // the first two have the same labels
  TRITONSERVER_Metric *level = nullptr, *sizes = nullptr;
};

// A metric with these labels: name, value, name, value, …
Error* new_metric(TRITONSERVER_MetricFamily* family, const std::vector<const char*>& labels,
                  const TRITONSERVER_MetricArgs* args, TRITONSERVER_Metric** metric) {
  std::vector<const TRITONSERVER_Parameter*> parameters;
  for (size_t i = 0; i < labels.size(); i += 2)
    parameters.push_back(TRITONSERVER_ParameterNew(labels[i], PARAMETER_STRING, labels[i + 1]));
  Error* error = args ? TRITONSERVER_MetricNewWithArgs(metric, family, parameters.data(), parameters.size(), args)
                      : TRITONSERVER_MetricNew(metric, family, parameters.data(), parameters.size());
  for (auto* parameter : parameters) TRITONSERVER_ParameterDelete(const_cast<TRITONSERVER_Parameter*>(parameter));
  return error;
}

Error* new_histogram(TRITONSERVER_MetricFamily* family, const std::vector<double>& bounds,
                     TRITONSERVER_Metric** metric) {
  TRITONSERVER_MetricArgs* args;
  TRY(TRITONSERVER_MetricArgsNew(&args));
  Error* error = TRITONSERVER_MetricArgsSetHistogram(args, bounds.data(), bounds.size());
  if (!error) error = new_metric(family, {}, args, metric);
  TRY(TRITONSERVER_MetricArgsDelete(args));
  return error;
}

void make(Families& made, Report& report) {
  TRITONSERVER_MetricKind kind;
  TRITONSERVER_Metric* metric;
  report.call("counter", TRITONSERVER_MetricFamilyNew(&made.counter, METRIC_COUNTER, "test_counts", "Counts"));
  report.call("gauge", TRITONSERVER_MetricFamilyNew(&made.gauge, METRIC_GAUGE, "test_level", "Level"));
  report.call("histogram", TRITONSERVER_MetricFamilyNew(&made.histogram, METRIC_HISTOGRAM, "test_sizes", "Sizes"));
  VALUE("GetMetricFamilyKind", TRITONSERVER_GetMetricFamilyKind(made.histogram, &kind), kind);
  for (auto labels : std::vector<std::vector<const char*>>{{"a", "1", "b", "x\"y"}, {"b", "x\"y", "a", "1"}, {}}) {
    report.call("MetricNew", new_metric(made.counter, labels, nullptr, &metric));
    made.counters.push_back(metric);
  }
  report.call("MetricNew of a gauge", new_metric(made.gauge, {"a", "1"}, nullptr, &made.level));
  report.call("MetricNewWithArgs", new_histogram(made.histogram, {1, 2.5, 10}, &made.sizes));
  VALUE("GetMetricKind", TRITONSERVER_GetMetricKind(made.level, &kind), kind);
  report.call("Set", TRITONSERVER_MetricSet(made.level, 5));
  report.call("Increment of a gauge", TRITONSERVER_MetricIncrement(made.level, -2));
  for (double size : {0.5, 2.5, 100.0}) report.call("Observe", TRITONSERVER_MetricObserve(made.sizes, size));
}

void change(Families& made, Report& report) {
  double value;
  report.call("Increment", TRITONSERVER_MetricIncrement(made.counters[0], 1.5));
  report.call("Increment of the same", TRITONSERVER_MetricIncrement(made.counters[1], 0.5));
  VALUE("Value", TRITONSERVER_MetricValue(made.counters[0], &value), value);
  VALUE("Value of a gauge", TRITONSERVER_MetricValue(made.level, &value), value);
}

void wrong(Families& made, Report& report) {
  TRITONSERVER_MetricFamily* family = nullptr;
  TRITONSERVER_Metric* metric = nullptr;
  double value = 0;
  int64_t number = 1;
  auto* label = TRITONSERVER_ParameterNew("n", PARAMETER_INT, &number);
  const TRITONSERVER_Parameter* labels[] = {label};
  auto new_family = [&](int kind, const char* name) {
    return TRITONSERVER_MetricFamilyNew(&family, static_cast<TRITONSERVER_MetricKind>(kind), name, "");
  };
  report.call("a family of kind 3", new_family(3, "test_none"));
  report.call("a family of another kind", new_family(METRIC_GAUGE, "test_counts"));
  report.call("a family's name", new_family(METRIC_COUNTER, "not a name"));
  report.call("a label's name", new_metric(made.counter, {"not a name", "1"}, nullptr, &metric));
  report.call("a label that is a number", TRITONSERVER_MetricNew(&metric, made.counter, labels, 1));
  report.call("a histogram without buckets", new_metric(made.histogram, {}, nullptr, &metric));
  report.call("a histogram's buckets", new_histogram(made.histogram, {2, 1}, &metric));
  report.call("a counter with buckets", new_histogram(made.counter, {1}, &metric));
  TRITONSERVER_MetricArgs* args;
  TRITONSERVER_MetricArgsNew(&args);
  report.call("a histogram with empty args", new_metric(made.histogram, {}, args, &metric));
  TRITONSERVER_MetricArgsDelete(args);
  report.call("Increment below 0", TRITONSERVER_MetricIncrement(made.counters[0], -1));
  report.call("Set of a counter", TRITONSERVER_MetricSet(made.counters[0], 1));
  report.call("Observe of a gauge", TRITONSERVER_MetricObserve(made.level, 1));
  report.call("Increment of a histogram", TRITONSERVER_MetricIncrement(made.sizes, 1));
  report.call("Set of a histogram", TRITONSERVER_MetricSet(made.sizes, 1));
  report.call("Value of a histogram", TRITONSERVER_MetricValue(made.sizes, &value));
  report.call("FamilyDelete before its metrics", TRITONSERVER_MetricFamilyDelete(made.counter));
  TRITONSERVER_ParameterDelete(label);
}

void delete_first(Families& made, Report& report) {
  report.call("MetricDelete", TRITONSERVER_MetricDelete(made.counters.front()));
  made.counters.erase(made.counters.begin());
}

}  // namespace

EXPORTED Error* TRITONBACKEND_ModelInitialize(TRITONBACKEND_Model* model) {
  return TRITONBACKEND_ModelSetState(model, new Families);
}

EXPORTED Error* TRITONBACKEND_ModelFinalize(TRITONBACKEND_Model* model) {
  void* state;
  TRY(TRITONBACKEND_ModelState(model, &state));
  std::unique_ptr<Families> made(static_cast<Families*>(state));
  for (auto* metric : made->counters) TRY(TRITONSERVER_MetricDelete(metric));
  if (made->level) TRY(TRITONSERVER_MetricDelete(made->level));
  if (made->sizes) TRY(TRITONSERVER_MetricDelete(made->sizes));
  for (auto* family : {made->counter, made->gauge, made->histogram})
    if (family) TRY(TRITONSERVER_MetricFamilyDelete(family));
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ModelInstanceExecute(TRITONBACKEND_ModelInstance* instance,
                                                   TRITONBACKEND_Request** requests, uint32_t count) {
  TRITONBACKEND_Model* model;
  void* state;
  TRY(TRITONBACKEND_ModelInstanceModel(instance, &model));
  TRY(TRITONBACKEND_ModelState(model, &state));
  auto& made = *static_cast<Families*>(state);
  for (uint32_t i = 0; i < count; ++i) {
    std::string command;
    TRY(command_of(requests[i], &command));
    Report report;
    if (command == "make") make(made, report);
    if (command == "change") change(made, report);
    if (command == "wrong") wrong(made, report);
    if (command == "delete") delete_first(made, report);
    TRY(answer_with_text(requests[i], report.text()));
  }
  return nullptr;
}
