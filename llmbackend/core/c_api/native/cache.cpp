// Response caches: TRITONCACHE_CacheEntry and _Allocator, and how the host calls a cache's library.
//
// An entry of the host is a single buffer. `TRITONCACHE_Copy` moves its bytes: into the memory that the cache has set in
// the entry (insert), or from the cache's memory to the host (lookup), while the cache holds its own lock.

#include <cstring>

#include "calls.h"
#include "objects.h"

struct TRITONCACHE_CacheEntry {
  struct Part {
    void* base;
    TRITONSERVER_BufferAttributes attributes;
  };
  std::vector<Part> parts;
};

struct TRITONCACHE_Allocator {
  const char* source = nullptr;  // of an insert: the host's bytes
  std::string found;             // of a lookup: the cache's bytes
};

struct TRITONCACHE_Cache;

namespace {

using Entry = TRITONCACHE_CacheEntry;
using Allocator = TRITONCACHE_Allocator;
using CacheFn = Error* (*)(TRITONCACHE_Cache*, const char* key, Entry*, Allocator*);

Error* part_at(Entry* entry, size_t index, Entry::Part** part) {
  if (index >= entry->parts.size())
    return invalid("index is " + std::to_string(index) + ", the entry has " + std::to_string(entry->parts.size()) +
                   " buffers");
  *part = &entry->parts[index];
  return nullptr;
}

}  // namespace

EXPORTED Error* TRITONCACHE_ApiVersion(uint32_t* major, uint32_t* minor) {
  *major = 0;
  *minor = 3;
  return nullptr;
}

EXPORTED Error* TRITONCACHE_CacheEntryNew(Entry** entry) {
  *entry = new Entry;
  return nullptr;
}

EXPORTED Error* TRITONCACHE_CacheEntryDelete(Entry* entry) {
  delete entry;
  return nullptr;
}

EXPORTED Error* TRITONCACHE_CacheEntryBufferCount(Entry* entry, size_t* count) {
  *count = entry->parts.size();
  return nullptr;
}

EXPORTED Error* TRITONCACHE_CacheEntryAddBuffer(Entry* entry, void* base, TRITONSERVER_BufferAttributes* attributes) {
  if (attributes->memory_type == MEMORY_GPU) return new_error(ERROR_UNSUPPORTED, "only CPU memory is cached");
  entry->parts.push_back({base, *attributes});
  return nullptr;
}

EXPORTED Error* TRITONCACHE_CacheEntryGetBuffer(Entry* entry, size_t index, void** base,
                                                TRITONSERVER_BufferAttributes* attributes) {
  Entry::Part* part = nullptr;
  if (Error* error = part_at(entry, index, &part)) return error;
  *base = part->base;
  *attributes = part->attributes;
  return nullptr;
}

EXPORTED Error* TRITONCACHE_CacheEntrySetBuffer(Entry* entry, size_t index, void* base,
                                                TRITONSERVER_BufferAttributes* attributes) {
  Entry::Part* part = nullptr;
  if (Error* error = part_at(entry, index, &part)) return error;
  part->base = base;
  if (attributes) part->attributes = *attributes;
  return nullptr;
}

EXPORTED Error* TRITONCACHE_Copy(Allocator* allocator, Entry* entry) {
  for (auto& part : entry->parts) {
    if (allocator->source)
      memcpy(part.base, allocator->source, part.attributes.byte_size);
    else
      allocator->found.append(static_cast<char*>(part.base), part.attributes.byte_size);
  }
  return nullptr;
}

// new_cache(address of CacheInitialize, config JSON): (error | None, cache)
PyObject* new_cache(PyObject*, PyObject* arguments) {
  unsigned long long address = 0;
  const char* config = nullptr;
  if (!PyArg_ParseTuple(arguments, "Ks", &address, &config)) return nullptr;
  TRITONCACHE_Cache* cache = nullptr;
  Error* error = nullptr;
  {
    Unlocked unlocked;
    error = reinterpret_cast<Error* (*)(TRITONCACHE_Cache**, const char*)>(address)(&cache, config);
  }
  return error_and_address(error, cache);
}

// cache_lookup(address of CacheLookup, cache, key): (error | None, bytes)
PyObject* cache_lookup(PyObject*, PyObject* arguments) {
  unsigned long long address = 0, cache = 0;
  const char* key = nullptr;
  if (!PyArg_ParseTuple(arguments, "KKs", &address, &cache, &key)) return nullptr;
  Entry entry;
  Allocator allocator;
  Error* error = nullptr;
  {
    Unlocked unlocked;
    error = reinterpret_cast<CacheFn>(address)(reinterpret_cast<TRITONCACHE_Cache*>(cache), key, &entry, &allocator);
  }
  Ref failure(result_of(error)), found(PyBytes_FromStringAndSize(allocator.found.data(), allocator.found.size()));
  return failure && found ? Py_BuildValue("(OO)", failure.get(), found.get()) : nullptr;
}

// cache_insert(address of CacheInsert, cache, key, bytes): error | None
PyObject* cache_insert(PyObject*, PyObject* arguments) {
  unsigned long long address = 0, cache = 0;
  const char *key = nullptr, *data = nullptr;
  Py_ssize_t byte_size = 0;
  if (!PyArg_ParseTuple(arguments, "KKsy#", &address, &cache, &key, &data, &byte_size)) return nullptr;
  Entry entry;
  entry.parts.push_back({const_cast<char*>(data), {static_cast<size_t>(byte_size)}});
  Allocator allocator{data};
  Error* error = nullptr;
  {
    Unlocked unlocked;
    error = reinterpret_cast<CacheFn>(address)(reinterpret_cast<TRITONCACHE_Cache*>(cache), key, &entry, &allocator);
  }
  return result_of(error);
}
