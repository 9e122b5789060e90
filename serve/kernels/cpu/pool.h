// The compute threads.
//
// A job is a number of chunks that the caller and the workers claim one by one; it is over when all
// chunks are done, whoever did them. A worker that the operating system keeps from running delays
// nobody as long as it holds no chunk: on small machines the HTTP process and the client compete
// for the same cores, and a barrier that waits for every thread costs whole time slices there.
//
// Workers spin for a moment after a job (the next operation of a layer follows within
// microseconds) and then sleep, so that an idle server uses no CPU.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace serve {

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls work(chunk, thread) for every chunk; `thread` < num_threads() is the caller's scratch id.
  template <class Work>
  void run(int64_t num_chunks, Work&& work) {
    if (num_chunks <= 1 || workers_.empty()) {
      for (int64_t chunk = 0; chunk < num_chunks; ++chunk) work(chunk, 0);
      return;
    }
    auto call = [](void* context, int64_t chunk, int thread) {
      (*static_cast<std::remove_reference_t<Work>*>(context))(chunk, thread);
    };
    run_job(num_chunks, call, &work);
  }

  // Calls work(first, last, thread) for at most `most_chunks` ranges that make up 0 … n, none more
  // than one longer than another.
  template <class Work>
  void run_ranges(int64_t n, int64_t most_chunks, Work&& work) {
    const int64_t chunks = std::min(n, most_chunks);
    run(chunks, [&](int64_t chunk, int thread) {
      work(n * chunk / chunks, n * (chunk + 1) / chunks, thread);
    });
  }

  // Into how many chunks to cut a product of this many rows with this many bytes of weights: as many
  // for every thread, of at least 16 KiB. Few and long ones for few rows, which fetch weights ahead
  // within a chunk; up to 32 a thread for many rows, so that none waits long for another's last one
  // (with 4 a thread, steps of 256 rows took 7 % longer).
  int64_t chunks_worth(int64_t num_rows, int64_t num_bytes) const {
    const int64_t most = std::clamp<int64_t>(num_rows, 4, 32);
    return num_threads() * std::clamp<int64_t>((num_bytes >> 14) / num_threads(), 1, most);
  }

  // A thread's own buffer of at least this many floats, 64-byte aligned. Contents do not last.
  // Numbers num_threads() and num_threads() + 1 are for who calls run() while the threads use theirs:
  // a whole step's activations, and what one operation prepares for all threads.
  float* scratch(int thread, size_t num_floats);

 private:
  using Call = void (*)(void*, int64_t, int);
  struct alignas(64) Scratch {
    std::unique_ptr<float[]> memory;
    size_t size = 0;
  };

  void run_job(int64_t num_chunks, Call call, void* context);
  void help(int thread);
  void work(int thread);

  // Chunks not yet claimed; negative once a job is used up. Claiming is a decrement, so a late
  // worker either gets a valid chunk of the job now running or nothing.
  alignas(64) std::atomic<int64_t> unclaimed_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<uint32_t> jobs_{0};
  std::atomic<bool> stopping_{false};
  int64_t num_chunks_ = 0;
  Call call_ = nullptr;
  void* context_ = nullptr;
  std::vector<Scratch> scratch_;
  std::vector<std::thread> workers_;
};

}  // namespace serve
