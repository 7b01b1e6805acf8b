// Values of the C API that are independent of the host: versions, names, errors, messages, parameters, buffer attributes.

#include <atomic>
#include <cstring>
#include <new>

#include "objects.h"

namespace {

constexpr const char* DATATYPES[] = {"<invalid>", "BOOL",  "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16",
                                     "INT32",     "INT64", "FP16",  "FP32",   "FP64",   "BYTES",  "BF16"};
constexpr uint32_t DATATYPE_BYTES[] = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 0, 2};
constexpr const char* ERROR_CODES[] = {"Unknown",     "Internal",    "Not found",      "Invalid argument",
                                       "Unavailable", "Unsupported", "Already exists", "Cancelled"};

template <size_t N, typename E>
const char* name_of(const char* const (&names)[N], E value) {
  return static_cast<size_t>(value) < N ? names[value] : "<invalid>";
}

}  // namespace

Error* new_error(TRITONSERVER_Error_Code code, std::string message) {
  return new TRITONSERVER_Error{code, std::move(message)};
}

Error* invalid(std::string message) { return new_error(ERROR_INVALID_ARG, std::move(message)); }

Error* out_of_bounds(uint32_t index, const std::string& owner, size_t count, const char* what, const std::string& tag) {
  return invalid(tag + "out of bounds index " + std::to_string(index) + ": " + owner + " " + std::to_string(count) +
                 " " + what);
}

const char* datatype_name(TRITONSERVER_DataType datatype) { return name_of(DATATYPES, datatype); }

TRITONSERVER_DataType datatype_of(const char* name) {
  for (int type = TYPE_BOOL; type <= TYPE_BF16; ++type)
    if (!strcmp(name, DATATYPES[type])) return static_cast<TRITONSERVER_DataType>(type);
  return TYPE_INVALID;
}

const void* TRITONSERVER_Parameter::pointer() const {
  switch (type) {
    case PARAMETER_STRING: return std::get<std::string>(data).c_str();
    case PARAMETER_INT: return &std::get<int64_t>(data);
    case PARAMETER_BOOL: return &std::get<bool>(data);
    case PARAMETER_DOUBLE: return &std::get<double>(data);
    default: return std::get<const void*>(data);
  }
}

Error* Buffer::allocate(size_t byte_size) {
  data.reset(new (std::nothrow) char[byte_size ? byte_size : 1]);
  if (!data)
    return new_error(ERROR_UNAVAILABLE, "unable to allocate " + std::to_string(byte_size) + " bytes of CPU memory");
  attributes.byte_size = byte_size;
  return nullptr;
}

EXPORTED Error* TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor) {
  *major = BACKEND_API_MAJOR;
  *minor = BACKEND_API_MINOR;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_ApiVersion(uint32_t* major, uint32_t* minor) {
  *major = SERVER_API_MAJOR;
  *minor = SERVER_API_MINOR;
  return nullptr;
}

// --- names ------------------------------------------------------------------------------------------------------------

EXPORTED const char* TRITONSERVER_DataTypeString(TRITONSERVER_DataType datatype) { return datatype_name(datatype); }

EXPORTED TRITONSERVER_DataType TRITONSERVER_StringToDataType(const char* name) { return datatype_of(name); }

EXPORTED uint32_t TRITONSERVER_DataTypeByteSize(TRITONSERVER_DataType datatype) {
  return static_cast<size_t>(datatype) < std::size(DATATYPE_BYTES) ? DATATYPE_BYTES[datatype] : 0;
}

EXPORTED const char* TRITONSERVER_MemoryTypeString(TRITONSERVER_MemoryType type) {
  static constexpr const char* NAMES[] = {"CPU", "CPU_PINNED", "GPU"};
  return name_of(NAMES, type);
}

EXPORTED const char* TRITONSERVER_ParameterTypeString(TRITONSERVER_ParameterType type) {
  static constexpr const char* NAMES[] = {"STRING", "INT", "BOOL", "DOUBLE", "BYTES"};
  return name_of(NAMES, type);
}

EXPORTED const char* TRITONSERVER_InstanceGroupKindString(TRITONSERVER_InstanceGroupKind kind) {
  static constexpr const char* NAMES[] = {"AUTO", "CPU", "GPU", "MODEL"};
  return name_of(NAMES, kind);
}

// --- errors -----------------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONSERVER_ErrorNew(TRITONSERVER_Error_Code code, const char* message) {
  return new_error(code, message ? message : "");
}

EXPORTED void TRITONSERVER_ErrorDelete(Error* error) { delete error; }

EXPORTED TRITONSERVER_Error_Code TRITONSERVER_ErrorCode(Error* error) { return error->code; }

EXPORTED const char* TRITONSERVER_ErrorCodeString(Error* error) { return name_of(ERROR_CODES, error->code); }

EXPORTED const char* TRITONSERVER_ErrorMessage(Error* error) { return error->message.c_str(); }

// --- messages ---------------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONSERVER_MessageNewFromSerializedJson(TRITONSERVER_Message** message, const char* base,
                                                          size_t byte_size) {
  *message = new TRITONSERVER_Message{std::string(base, byte_size)};
  return nullptr;
}

EXPORTED Error* TRITONSERVER_MessageDelete(TRITONSERVER_Message* message) {
  delete message;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_MessageSerializeToJson(TRITONSERVER_Message* message, const char** base,
                                                    size_t* byte_size) {
  *base = message->json.c_str();
  *byte_size = message->json.size();
  return nullptr;
}

// --- parameters -------------------------------------------------------------------------------------------------------

EXPORTED TRITONSERVER_Parameter* TRITONSERVER_ParameterNew(const char* name, TRITONSERVER_ParameterType type,
                                                           const void* value) {
  switch (type) {
    case PARAMETER_STRING:
      return new TRITONSERVER_Parameter{name, type, std::string(static_cast<const char*>(value))};
    case PARAMETER_INT: return new TRITONSERVER_Parameter{name, type, *static_cast<const int64_t*>(value)};
    case PARAMETER_BOOL: return new TRITONSERVER_Parameter{name, type, *static_cast<const bool*>(value)};
    case PARAMETER_DOUBLE: return new TRITONSERVER_Parameter{name, type, *static_cast<const double*>(value)};
    default: return nullptr;
  }
}

EXPORTED TRITONSERVER_Parameter* TRITONSERVER_ParameterBytesNew(const char* name, const void* bytes,
                                                                uint64_t byte_size) {
  return new TRITONSERVER_Parameter{name, PARAMETER_BYTES, bytes, byte_size};
}

EXPORTED void TRITONSERVER_ParameterDelete(TRITONSERVER_Parameter* parameter) { delete parameter; }

// --- buffer attributes ------------------------------------------------------------------------------------------------

EXPORTED Error* TRITONSERVER_BufferAttributesNew(TRITONSERVER_BufferAttributes** attributes) {
  *attributes = new TRITONSERVER_BufferAttributes;
  return nullptr;
}

EXPORTED Error* TRITONSERVER_BufferAttributesDelete(TRITONSERVER_BufferAttributes* attributes) {
  delete attributes;
  return nullptr;
}

#define ATTRIBUTE(NAME, TYPE, FIELD)                                                                             \
  EXPORTED Error* TRITONSERVER_BufferAttributesSet##NAME(TRITONSERVER_BufferAttributes* attributes, TYPE value) { \
    attributes->FIELD = value;                                                                                   \
    return nullptr;                                                                                              \
  }                                                                                                              \
  EXPORTED Error* TRITONSERVER_BufferAttributes##NAME(TRITONSERVER_BufferAttributes* attributes, TYPE* value) {   \
    *value = attributes->FIELD;                                                                                  \
    return nullptr;                                                                                              \
  }
ATTRIBUTE(MemoryTypeId, int64_t, memory_type_id)
ATTRIBUTE(MemoryType, TRITONSERVER_MemoryType, memory_type)
ATTRIBUTE(CudaIpcHandle, void*, cuda_ipc_handle)
ATTRIBUTE(ByteSize, size_t, byte_size)
#undef ATTRIBUTE
