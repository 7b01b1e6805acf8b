// Memory on huge pages, which the CPU reads about a quarter faster than memory on small pages.
//
// Used for scratch memory here; for weights and KV memory through Python. Invariant: memory is zeroed when allocated,
// and committed only when first written.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#else
#include <cstdlib>
#include <cstring>
#endif

namespace llmb {

constexpr size_t kHugePage = size_t{2} << 20;

inline size_t whole_pages(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

// Null if there is none. Free with release_memory and the same size.
inline void* acquire_memory(size_t bytes) {
#if defined(__linux__)
    const size_t size = whole_pages(bytes);
    char* mapped = static_cast<char*>(
        mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (mapped == MAP_FAILED) return nullptr;
    const size_t lead = (kHugePage - reinterpret_cast<uintptr_t>(mapped) % kHugePage) % kHugePage;
    if (lead) munmap(mapped, lead);
    munmap(mapped + lead + size, kHugePage - lead);
    madvise(mapped + lead, size, MADV_HUGEPAGE);
    return mapped + lead;
#else
    return std::calloc(1, bytes);
#endif
}

inline void release_memory(void* memory, size_t bytes) {
#if defined(__linux__)
    munmap(memory, whole_pages(bytes));
#else
    std::free(memory);
#endif
}

// Memory that grows and is kept across calls. Contents are lost when at_least grows it.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() {
        if (memory_) release_memory(memory_, bytes_);
    }

    char* at_least(size_t bytes) {
        if (bytes > bytes_) {
            if (memory_) release_memory(memory_, bytes_);
            memory_ = acquire_memory(bytes);
            bytes_ = memory_ ? bytes : 0;
        }
        return static_cast<char*>(memory_);
    }

  private:
    void* memory_ = nullptr;
    size_t bytes_ = 0;
};

// Carves arrays from a block of memory; with a null block, only counts the bytes.
class Carver {
  public:
    explicit Carver(char* memory) : memory_(memory) {}

    template <class T>
    T* take(size_t count) {
        T* taken = reinterpret_cast<T*>(memory_ + used_);
        used_ += (count * sizeof(T) + 63) / 64 * 64;
        return taken;
    }

    size_t used() const { return used_; }

  private:
    char* memory_;
    size_t used_ = 0;
};

}  // namespace llmb
