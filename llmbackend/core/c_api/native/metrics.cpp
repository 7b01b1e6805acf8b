// Metrics of backends: TRITONSERVER_MetricFamily, _Metric, _MetricArgs.

#include "objects.h"

struct TRITONSERVER_MetricFamily {
  TRITONSERVER_MetricKind kind;
  std::string name;
  Ref host;  // core's MetricFamily
  uint32_t metric_count = 0;
};

struct TRITONSERVER_MetricArgs {
  bool is_histogram = false;
  std::vector<double> buckets;
};

struct TRITONSERVER_Metric {
  TRITONSERVER_MetricFamily* family;
  Ref labels;  // dict
};

namespace {

Error* change(TRITONSERVER_Metric* metric, const char* action, double value) {
  Locked lock;
  return host_call("change_metric",
                   Py_BuildValue("(OOsd)", metric->family->host.get(), metric->labels.get(), action, value));
}

Error* wrong_kind(const TRITONSERVER_Metric* metric, const char* action) {
  static constexpr const char* KINDS[] = {"COUNTER", "GAUGE", "HISTOGRAM"};
  return new_error(ERROR_UNSUPPORTED, std::string("TRITONSERVER_METRIC_KIND_") + KINDS[metric->family->kind] +
                                          " does not support " + action);
}

Error* check_args(const TRITONSERVER_MetricFamily* family, const TRITONSERVER_MetricArgs* args) {
  if (family->kind != METRIC_HISTOGRAM)
    return args ? invalid(std::string("Unexpected args found in ") +
                          (family->kind == METRIC_COUNTER ? "counter" : "gauge") + " Metric constructor.")
                : nullptr;
  if (!args) return invalid("Bucket boundaries not found in Metric args.");
  return args->is_histogram ? nullptr : invalid("Metric args not set to histogram kind.");
}

}  // namespace

EXPORTED Error* TRITONSERVER_MetricFamilyNew(TRITONSERVER_MetricFamily** family, TRITONSERVER_MetricKind kind,
                                             const char* name, const char* description) {
  if (kind > METRIC_HISTOGRAM) return invalid("Unsupported kind passed to MetricFamily constructor.");
  Locked lock;
  Ref host;
  if (Error* error = host_call("metric_family", Py_BuildValue("(iss)", kind, name, description), &host)) return error;
  *family = new TRITONSERVER_MetricFamily{kind, name, std::move(host)};
  return nullptr;
}

EXPORTED Error* TRITONSERVER_MetricFamilyDelete(TRITONSERVER_MetricFamily* family) {
  Locked lock;
  if (family->metric_count)
    return new_error(ERROR_INTERNAL, "Must call MetricDelete on all dependent metrics before calling "
                                     "MetricFamilyDelete.");
  delete family;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_GetMetricFamilyKind(TRITONSERVER_MetricFamily* family, TRITONSERVER_MetricKind* kind) {
  *kind = family->kind;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_GetMetricKind(TRITONSERVER_Metric* metric, TRITONSERVER_MetricKind* kind) {
  *kind = metric->family->kind;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_MetricArgsNew(TRITONSERVER_MetricArgs** args) {
  *args = new TRITONSERVER_MetricArgs;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_MetricArgsSetHistogram(TRITONSERVER_MetricArgs* args, const double* buckets,
                                                    uint64_t count) {
  args->is_histogram = true;
  args->buckets.assign(buckets, buckets + count);
  return nullptr;
}

EXPORTED Error* TRITONSERVER_MetricArgsDelete(TRITONSERVER_MetricArgs* args) {
  delete args;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_MetricNewWithArgs(TRITONSERVER_Metric** metric, TRITONSERVER_MetricFamily* family,
                                               const TRITONSERVER_Parameter** labels, uint64_t label_count,
                                               const TRITONSERVER_MetricArgs* args) {
  if (Error* error = check_args(family, args)) return error;
  Parameters copies;
  for (uint64_t i = 0; i < label_count; ++i) {
    if (labels[i]->type != PARAMETER_STRING)
      return invalid("Parameter [" + labels[i]->name +
                     "] must have a type of TRITONSERVER_PARAMETER_STRING to be added as a label.");
    copies.push_back(*labels[i]);
  }
  Locked lock;
  Ref dict(parameter_dict(copies)), buckets(PyList_New(0));
  for (size_t i = 0; buckets && args && i < args->buckets.size(); ++i) {
    Ref bound(PyFloat_FromDouble(args->buckets[i]));
    if (!bound || PyList_Append(buckets.get(), bound.get())) return take_exception();
  }
  if (!dict || !buckets) return take_exception();
  Error* error = host_call("declare_metric", Py_BuildValue("(OOO)", family->host.get(), dict.get(), buckets.get()));
  if (error) return error;
  *metric = new TRITONSERVER_Metric{family, std::move(dict)};
  ++family->metric_count;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_MetricNew(TRITONSERVER_Metric** metric, TRITONSERVER_MetricFamily* family,
                                       const TRITONSERVER_Parameter** labels, uint64_t label_count) {
  return TRITONSERVER_MetricNewWithArgs(metric, family, labels, label_count, nullptr);
}

EXPORTED Error* TRITONSERVER_MetricDelete(TRITONSERVER_Metric* metric) {
  Locked lock;
  Error* error = host_call("remove_metric", Py_BuildValue("(OO)", metric->family->host.get(), metric->labels.get()));
  --metric->family->metric_count;
  delete metric;
  return error;
}

EXPORTED Error* TRITONSERVER_MetricValue(TRITONSERVER_Metric* metric, double* value) {
  if (metric->family->kind == METRIC_HISTOGRAM) return wrong_kind(metric, "Value");
  Locked lock;
  Ref read;
  Error* error = host_call("metric_value", Py_BuildValue("(OO)", metric->family->host.get(), metric->labels.get()),
                           &read);
  if (error) return error;
  *value = PyFloat_AsDouble(read.get());
  return nullptr;
}

EXPORTED Error* TRITONSERVER_MetricIncrement(TRITONSERVER_Metric* metric, double value) {
  if (metric->family->kind == METRIC_HISTOGRAM) return wrong_kind(metric, "Increment");
  if (metric->family->kind == METRIC_COUNTER && value < 0)
    return invalid("TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.");
  return change(metric, "increment", value);
}

EXPORTED Error* TRITONSERVER_MetricSet(TRITONSERVER_Metric* metric, double value) {
  if (metric->family->kind != METRIC_GAUGE) return wrong_kind(metric, "Set");
  return change(metric, "set", value);
}

EXPORTED Error* TRITONSERVER_MetricObserve(TRITONSERVER_Metric* metric, double value) {
  if (metric->family->kind != METRIC_HISTOGRAM) return wrong_kind(metric, "Observe");
  return change(metric, "observe", value);
}
