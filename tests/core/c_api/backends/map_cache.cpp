// A response cache: a map that owns copies of the entries.
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "backend.h"

struct TRITONCACHE_CacheEntry;
struct TRITONCACHE_Allocator;
IMPORTED Error* TRITONCACHE_CacheEntryBufferCount(TRITONCACHE_CacheEntry*, size_t*);
IMPORTED Error* TRITONCACHE_CacheEntryAddBuffer(TRITONCACHE_CacheEntry*, void*, TRITONSERVER_BufferAttributes*);
IMPORTED Error* TRITONCACHE_CacheEntryGetBuffer(TRITONCACHE_CacheEntry*, size_t, void**, TRITONSERVER_BufferAttributes*);
IMPORTED Error* TRITONCACHE_CacheEntrySetBuffer(TRITONCACHE_CacheEntry*, size_t, void*, TRITONSERVER_BufferAttributes*);
IMPORTED Error* TRITONCACHE_Copy(TRITONCACHE_Allocator*, TRITONCACHE_CacheEntry*);
IMPORTED Error* TRITONSERVER_BufferAttributesNew(TRITONSERVER_BufferAttributes**);
IMPORTED Error* TRITONSERVER_BufferAttributesDelete(TRITONSERVER_BufferAttributes*);
IMPORTED Error* TRITONSERVER_BufferAttributesByteSize(TRITONSERVER_BufferAttributes*, size_t*);
IMPORTED Error* TRITONSERVER_BufferAttributesSetByteSize(TRITONSERVER_BufferAttributes*, size_t);

struct TRITONCACHE_Cache {
  std::mutex mutex;
  std::map<std::string, std::vector<std::string>> entries;
  bool is_away = false;  // every lookup fails
};

EXPORTED Error* TRITONCACHE_CacheInitialize(TRITONCACHE_Cache** cache, const char* config) {
  if (std::string(config).find("\"size\"") == std::string::npos)
    return TRITONSERVER_ErrorNew(ERROR_INVALID_ARG, "a setting 'size' is expected");
  *cache = new TRITONCACHE_Cache;
  (*cache)->is_away = std::string(config).find("\"away\"") != std::string::npos;
  return nullptr;
}

EXPORTED Error* TRITONCACHE_CacheFinalize(TRITONCACHE_Cache* cache) {
  delete cache;
  return nullptr;
}

EXPORTED Error* TRITONCACHE_CacheInsert(TRITONCACHE_Cache* cache, const char* key, TRITONCACHE_CacheEntry* entry,
                                        TRITONCACHE_Allocator* allocator) {
  std::lock_guard lock(cache->mutex);
  if (cache->entries.count(key)) return TRITONSERVER_ErrorNew(ERROR_ALREADY_EXISTS, key);
  size_t count, byte_size;
  TRY(TRITONCACHE_CacheEntryBufferCount(entry, &count));
  std::vector<std::string> parts(count);
  TRITONSERVER_BufferAttributes* attributes;
  TRY(TRITONSERVER_BufferAttributesNew(&attributes));
  for (size_t i = 0; i < count; ++i) {
    void* base;
    TRY(TRITONCACHE_CacheEntryGetBuffer(entry, i, &base, attributes));
    TRY(TRITONSERVER_BufferAttributesByteSize(attributes, &byte_size));
    parts[i].resize(byte_size);
    TRY(TRITONCACHE_CacheEntrySetBuffer(entry, i, parts[i].data(), attributes));
  }
  TRY(TRITONCACHE_Copy(allocator, entry));
  cache->entries[key] = std::move(parts);
  return TRITONSERVER_BufferAttributesDelete(attributes);
}

EXPORTED Error* TRITONCACHE_CacheLookup(TRITONCACHE_Cache* cache, const char* key, TRITONCACHE_CacheEntry* entry,
                                        TRITONCACHE_Allocator* allocator) {
  std::lock_guard lock(cache->mutex);
  if (cache->is_away) return TRITONSERVER_ErrorNew(ERROR_UNAVAILABLE, "the cache is away");
  auto found = cache->entries.find(key);
  if (found == cache->entries.end()) return TRITONSERVER_ErrorNew(ERROR_NOT_FOUND, key);
  TRITONSERVER_BufferAttributes* attributes;
  TRY(TRITONSERVER_BufferAttributesNew(&attributes));
  for (auto& part : found->second) {
    TRY(TRITONSERVER_BufferAttributesSetByteSize(attributes, part.size()));
    TRY(TRITONCACHE_CacheEntryAddBuffer(entry, part.data(), attributes));
  }
  TRY(TRITONSERVER_BufferAttributesDelete(attributes));
  return TRITONCACHE_Copy(allocator, entry);
}
