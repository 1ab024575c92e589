// The caller's threads kept together over many short loops. Include it from baseline files only: code
// compiled for one ISA must not be shared.
#ifndef ENGINEBAY_TEAM_H
#define ENGINEBAY_TEAM_H

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "enginebay/abi.h"
#include "parallel.h"

namespace enginebay {

// Handing one loop to a pool costs some microseconds, as long as a small product takes. A team asks the pool
// once: the thread that comes first leads and runs the whole work, the others wait busily for its loops and
// take indices from them. Nobody is waited for who has not taken one, so that a team of one is a team too,
// whenever the pool gets round to the rest.
class Team {
 public:
  // Runs work(context, team) on one thread; loops that it gives to that context are shared. The team is NULL
  // where there is one thread. A pool that fails to run anything tells its owner, not us.
  template <class Work>
  static void run(const eb_context* outer, const Work& work) {
    if (thread_count(outer) == 1) {
      work(outer, static_cast<Team*>(nullptr));
      return;
    }
    Team team;
    eb_context inner = *outer;
    inner.parallel_for = share;
    inner.pool = &team;
    std::atomic<bool> led{false};
    parallel_for(outer, thread_count(outer), [&](size_t) {
      const uint64_t before = team.members_.fetch_add(1, std::memory_order_relaxed);
      if (led.exchange(true, std::memory_order_relaxed)) return team.help(before);
      work(&inner, &team);
      team.over_.store(true, std::memory_order_release);
    });
  }

  // The next loop's indices will read these bytes, in order. Who waits for that loop fetches the beginning of
  // what will be its share: memory is the bottleneck of few rows, and would be idle meanwhile.
  void expect(const void* memory, size_t bytes) {
    const auto* begin = static_cast<const uint8_t*>(memory);
    fetch(begin, begin + std::min(bytes, kOwnAhead));
    bytes_.store(bytes, std::memory_order_relaxed);
    memory_.store(begin, std::memory_order_release);
  }

 private:
  static constexpr size_t kOwnAhead = 4 << 10, kAhead = 192 << 10;  // of L2's 1 MiB or so

  // A loop's number, count and next index in one word: whoever takes an index of an old loop fails.
  static constexpr int kBits = 24;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;

  static void share(void* pool, size_t count, eb_task body, void* argument) {
    static_cast<Team*>(pool)->lead(count, body, argument);
  }

  void lead(size_t count, eb_task body, void* argument) {
    if (count > kMask) {  // more than the word can tell: nothing of this size is in a hurry
      for (size_t i = 0; i < count; ++i) body(argument, i);
      return;
    }
    body_ = body;
    argument_ = argument;
    done_.store(0, std::memory_order_relaxed);
    loop_.store(++number_ << (2 * kBits) | static_cast<uint64_t>(count) << kBits, std::memory_order_release);
    while (take()) {
    }
    for (int turns = 0; done_.load(std::memory_order_acquire) != count; ++turns) wait(turns);
  }

  void help(uint64_t before) {
    constexpr ptrdiff_t kStep = 1024;  // a few dozen ns of memory's time
    const uint8_t *seen = nullptr, *at = nullptr, *end = nullptr;
    for (int turns = 0; !over_.load(std::memory_order_acquire); ++turns) {
      while (take()) turns = 0;
      const uint8_t* memory = memory_.load(std::memory_order_acquire);
      if (memory != seen) {
        const size_t bytes = bytes_.load(std::memory_order_relaxed);
        const size_t first = bytes / std::max<uint64_t>(members_.load(std::memory_order_relaxed), 2) * before;
        seen = memory;
        at = memory + std::min(first, bytes);
        end = at + std::min(bytes - std::min(first, bytes), kAhead);
      }
      if (at != end) {
        const uint8_t* until = at + std::min(kStep, end - at);
        fetch(at, until);
        at = until;
      } else {
        wait(turns);
      }
    }
  }

  static void fetch(const uint8_t* begin, const uint8_t* end) {
    for (; begin < end; begin += 64) __builtin_prefetch(begin, 0, 2);
  }

  // Runs a share of what is left of the loop at hand; false where nothing is. Until it is done the loop
  // cannot change. Shares are runs of indices, large ones first: neighbours in memory are best read by one
  // thread.
  bool take() {
    const uint64_t members = std::max<uint64_t>(members_.load(std::memory_order_relaxed), 2);
    uint64_t loop = loop_.load(std::memory_order_acquire), index, share;
    do {
      index = loop & kMask;
      const uint64_t left = (loop >> kBits & kMask) - index;
      if (left == 0) return false;
      share = (left + members - 1) / members;
    } while (!loop_.compare_exchange_weak(loop, loop + share, std::memory_order_acq_rel,
                                          std::memory_order_acquire));
    for (uint64_t i = index; i < index + share; ++i) body_(argument_, static_cast<size_t>(i));
    done_.fetch_add(static_cast<size_t>(share), std::memory_order_release);
    return true;
  }

  // Busily as long as a loop may take, then leaving the core to others between looks.
  static void wait(int turns) {
    constexpr int kBusy = 4096;
    if (turns < kBusy) {
      __builtin_ia32_pause();
    } else {
      std::this_thread::yield();
    }
  }

  alignas(64) std::atomic<uint64_t> loop_{0};
  uint64_t number_ = 0;
  eb_task body_ = nullptr;
  void* argument_ = nullptr;
  alignas(64) std::atomic<size_t> done_{0};
  alignas(64) std::atomic<bool> over_{false};
  std::atomic<const uint8_t*> memory_{nullptr};  // expected
  std::atomic<size_t> bytes_{0};
  std::atomic<uint64_t> members_{0};  // who came
};

}  // namespace enginebay
#endif
