#include "pool.h"

#include <immintrin.h>
#include <sched.h>

namespace serve {

namespace {
// A pause is some 10 to 50 ns, so workers stay awake for about 0.1 ms after a job. The caller, once
// it only waits for others' chunks, gives its core away much sooner: the thread it waits for may
// be queued behind it.
constexpr int kWorkerSpins = 4000;
constexpr int kCallerSpins = 1000;
}  // namespace

Pool::Pool(int num_threads) : scratch_(static_cast<size_t>(num_threads) + 2) {
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread] { work(thread); });
  }
}

Pool::~Pool() {
  stopping_.store(true);
  jobs_.fetch_add(1);
  jobs_.notify_all();
  for (auto& worker : workers_) worker.join();
}

float* Pool::scratch(int thread, size_t num_floats) {
  constexpr size_t kAlign = 64 / sizeof(float);
  auto& own = scratch_[static_cast<size_t>(thread)];
  if (own.size < num_floats) {
    own.memory = std::make_unique<float[]>(num_floats + kAlign);
    own.size = num_floats;
  }
  auto address = reinterpret_cast<uintptr_t>(own.memory.get());
  return reinterpret_cast<float*>((address + 63) & ~uintptr_t{63});
}

void Pool::run_job(int64_t num_chunks, Call call, void* context) {
  num_chunks_ = num_chunks;
  call_ = call;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  unclaimed_.store(num_chunks, std::memory_order_release);
  jobs_.fetch_add(1);
  jobs_.notify_all();
  help(0);
  for (int spins = 0; done_.load(std::memory_order_acquire) != num_chunks; ++spins) {
    if (spins < kCallerSpins) {
      _mm_pause();
    } else {
      sched_yield();
    }
  }
}

void Pool::help(int thread) {
  int64_t left;
  while ((left = unclaimed_.fetch_sub(1, std::memory_order_acq_rel)) > 0) {
    call_(context_, num_chunks_ - left, thread);
    done_.fetch_add(1, std::memory_order_release);
  }
}

void Pool::work(int thread) {
  while (true) {
    uint32_t seen = jobs_.load();
    int spins = 0;
    while (unclaimed_.load(std::memory_order_relaxed) <= 0 && spins < kWorkerSpins) {
      _mm_pause();
      ++spins;
    }
    if (stopping_.load()) return;
    if (unclaimed_.load() > 0) {
      help(thread);
    } else {
      jobs_.wait(seen);
    }
  }
}

}  // namespace serve
