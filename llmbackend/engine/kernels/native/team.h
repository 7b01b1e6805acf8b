// A small team of threads that runs one function together, with barriers inside it.
//
// Runs a whole engine step as one parallel region. Invariants: a team's threads live as long as the team; a waiting
// thread yields its core to other threads, and sleeps after 10 ms; how work is shared affects which thread computes a
// result, never the result.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llmb {

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// Returns once `word` no longer equals `old`. Spins first, because waking a sleeping thread takes longer than most
// operations, especially in a virtual machine; then yields its core repeatedly; then sleeps.
//
// It yields for longer than the host usually preempts another thread of the team: a few milliseconds after each step. If
// this thread slept meanwhile, the scheduler would migrate the preempted thread to this core, and both would stay on it
// long after the other core is idle.
inline void wait_while(const std::atomic<uint32_t>& word, uint32_t old) {
    using Clock = std::chrono::steady_clock;
    constexpr int kSpins = 400;  // tens of microseconds
    constexpr int kYieldsPerLook = 16;
    constexpr std::chrono::milliseconds kYieldTime{10};
    for (int i = 0; i < kSpins; i++) {
        if (word.load(std::memory_order_acquire) != old) return;
        pause_briefly();
    }
    for (const auto until = Clock::now() + kYieldTime; Clock::now() < until;) {
        for (int i = 0; i < kYieldsPerLook; i++) {
            if (word.load(std::memory_order_acquire) != old) return;
            std::this_thread::yield();
        }
    }
    word.wait(old, std::memory_order_acquire);
}

class Team;

// One thread's view of the team while a function runs. All workers must reach the same barriers.
struct Worker {
    Team& team;
    int rank;
    int size;

    void barrier();

    // Calls f(begin, end) for pieces of at most `grain` items, smaller ones towards the end, until all of 0..n-1 are
    // taken. At most one call of share between two barriers; results of other workers may be read only after the next
    // barrier.
    template <class F>
    void share(int n, int grain, F&& f);
};

class Team {
  public:
    // Throws std::system_error if the system does not start a thread.
    explicit Team(int size) : size_(size) {
        try {
            for (int rank = 1; rank < size; rank++) threads_.emplace_back([this, rank] { serve(rank); });
        } catch (...) {
            end_threads();
            throw;
        }
    }

    ~Team() { end_threads(); }

    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Runs f(worker) on every thread, including the caller; returns when all are done. One caller at a time.
    template <class F>
    void run(F&& f) {
        context_ = &f;
        job_ = [](void* context, Worker& worker) { (*static_cast<std::remove_reference_t<F>*>(context))(worker); };
        next_.store(0, std::memory_order_relaxed);
        start_.fetch_add(1, std::memory_order_release);
        if (size_ > 1) start_.notify_all();
        Worker worker{*this, 0, size_};
        job_(context_, worker);
        worker.barrier();
    }

  private:
    friend struct Worker;

    void serve(int rank) {
        uint32_t seen = 0;
        while (true) {
            wait_while(start_, seen);
            seen++;
            if (job_ == nullptr) return;
            Worker worker{*this, rank, size_};
            job_(context_, worker);
            worker.barrier();
        }
    }

    void end_threads() {
        job_ = nullptr;
        start_.fetch_add(1, std::memory_order_release);
        start_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    const int size_;
    std::vector<std::thread> threads_;
    void (*job_)(void*, Worker&) = nullptr;
    void* context_ = nullptr;
    std::atomic<uint32_t> start_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> next_{0};
};

inline void Worker::barrier() {
    if (size == 1) {
        team.next_.store(0, std::memory_order_relaxed);
        return;
    }
    const uint32_t phase = team.phase_.load(std::memory_order_relaxed);
    if (team.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
        team.arrived_.store(0, std::memory_order_relaxed);
        team.next_.store(0, std::memory_order_relaxed);
        team.phase_.store(phase + 1, std::memory_order_release);
        team.phase_.notify_all();
    } else {
        wait_while(team.phase_, phase);
    }
}

template <class F>
void Worker::share(int n, int grain, F&& f) {
    int begin = team.next_.load(std::memory_order_relaxed);
    while (begin < n) {
        const int fair = (n - begin) / (2 * size);  // leaves enough for all to finish at about the same time
        const int end = std::min(begin + std::clamp(fair, 1, grain), n);
        if (!team.next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
        f(begin, end);
        begin = team.next_.load(std::memory_order_relaxed);
    }
}

}  // namespace llmb
