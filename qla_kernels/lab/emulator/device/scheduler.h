// What runs: blocks of fibers, one fiber per CUDA thread, and the asynchronous copies between them.
//
// A fiber runs until it waits for something; the scheduler (runtime/scheduler.cpp) then picks, from
// a seeded random stream, which warp goes next, which warp is slow, and when a copy lands. Nothing
// is ever preempted, so a seed reproduces an interleaving exactly.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <source_location>
#include <string>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

#include "cuda.h"

namespace emu {

constexpr int kWarp = 32;
constexpr int kWarpgroup = 128;
constexpr int kMostWarpgroups = 8;  // of a block
using Where = std::source_location;  // the line of the generated kernel, for reports

// Reports the mistake with the state of every thread of the block, and ends the process.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

std::string format(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string at(const Where& where);  // " (kernel.cpp:57)"

// ---- asynchronous operations ----

// Commit groups of one kind in one thread: cp.async, bulk stores, wgmma.
struct Groups {
  int open = 0;         // the group that the next operation joins
  int last_used = -1;   // the latest group holding an operation
  int last_waited = -1; // the latest group that a wait has covered
  void commit() { ++open; }
  bool unwaited() const { return last_used > last_waited; }
};

enum class Copy { TmaLoad, TmaStore, CpAsync, CpAsyncArrive };

struct Thread;
struct Pending {
  Copy kind;
  Thread* issuer;
  int group;
  std::function<void()> land;
};

using Products = uint32_t[kMostWarpgroups];  // how many, of each warpgroup

template <size_t n>
void take_later(uint32_t (&mine)[n], const uint32_t (&others)[n]) {
  for (size_t i = 0; i < n; ++i) mine[i] = mine[i] > others[i] ? mine[i] : others[i];
}

// What is known of products: by a thread, which has issued them, has waited for them, or was told;
// and by what tells it, a barrier or a warp's meeting.
struct Known {
  Products issued = {}, done = {};
  void join(const Known& other) {
    take_later(issued, other.issued);
    take_later(done, other.done);
  }
  // Who does not even know that a product was issued was not told to go on behind it.
  bool only_issued(const Products& products) const {
    bool any = false;
    for (int i = 0; i < kMostWarpgroups; ++i)
      any |= done[i] < products[i] && issued[i] >= products[i];
    return any;
  }
};

// Who writes to shared memory: a warp, or the copies of mbarriers with one number modulo kCopies.
constexpr int kMostWarps = 32, kCopies = 32, kWriters = kMostWarps + kCopies;

// What is known of writes, by a warp or by what tells it: of each writer, all up to a time.
struct Written {
  uint32_t until[kWriters] = {};
  void join(const Written& other) { take_later(until, other.until); }
};

// What a barrier tells.
struct Told {
  Known known;
  Written written;
  void hear();  // from the running thread
  void tell() const;
};

// ---- threads ----

// Why a fiber is suspended: asked again by the scheduler, described in reports.
struct Waiting {
  const void* state;
  bool (*ready)(const void* state);
  std::string (*describe)(const void* state);
};

struct Thread {
  int index = 0;
  bool started = false;
  bool done = false;
  const Waiting* waiting = nullptr;
  jmp_buf registers;
  ucontext_t entry;

  uint32_t fenced = 0;  // time of the last proxy fence
  int guard = -1;       // number of the mbarrier that it waited for last
  Known known;
  Written* written;  // its warp's
  Groups stores, cp_asyncs, wgmmas;
  std::vector<long> wgmmas_committed;  // wgmma instructions issued up to the end of each open group
  long wgmmas_issued = 0;
};

struct Meeting;       // warp.h
struct MBarrier;      // mbarrier.h
struct NamedBarrier;  // named_barrier.h
struct SharedMemory;  // shared_memory.h
struct WgmmaQueue;    // wgmma.h

enum class Schedule {
  Random,  // copies land at random times
  Late,    // copies land only when no thread can move: exposes every missing wait
  Eager,   // copies land at once: tells a race from wrong arithmetic
};

struct Block {
  dim3 index, grid, shape;
  Schedule schedule;
  uint64_t random;
  uint32_t clock = 1;  // counts fences, arrivals, loads that land, and issues of what reads later
  std::deque<Thread> threads;
  std::deque<Pending> pending;
  const Pending* landing = nullptr;  // the copy being carried out, when no thread runs

  SharedMemory* shared = nullptr;
  std::unordered_map<const void*, void*> static_shared;  // declaration -> array

  std::vector<std::vector<std::shared_ptr<Meeting>>> meetings;  // per warp
  std::vector<Written> written;                                 // per warp
  std::deque<WgmmaQueue> warpgroups;
  std::vector<NamedBarrier> named_barriers;
  std::deque<MBarrier> mbarriers;
  std::unordered_map<const void*, std::string> mbarrier_names;

  Block(dim3 index, dim3 grid, dim3 shape, Schedule schedule, uint64_t seed);
  ~Block();
  int size() const { return int(shape.x * shape.y * shape.z); }
};

extern thread_local Block* block;     // the block that this host thread runs
extern thread_local Thread* current;  // the CUDA thread that runs now, if one does

inline void Told::hear() {
  current->written->until[current->index / kWarp] = block->clock++;
  known.join(current->known);
  written.join(*current->written);
}
inline void Told::tell() const {
  current->known.join(known);
  current->written->join(written);
}

void suspend();  // back to the scheduler; returns when the thread is picked again

// Suspends the running thread until ready(); describe() says what it waits for.
template <class Ready, class Describe>
void wait_until(Ready ready, Describe describe) {
  if (ready()) return;
  struct State {
    Ready& ready;
    Describe& describe;
  } state{ready, describe};
  Waiting waiting{
      &state, [](const void* s) { return static_cast<const State*>(s)->ready(); },
      [](const void* s) { return std::string(static_cast<const State*>(s)->describe()); }};
  current->waiting = &waiting;
  suspend();
  current->waiting = nullptr;
}

inline uint64_t random_bits() {  // xorshift64
  uint64_t& state = block->random;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}
inline bool one_in(int n) { return random_bits() % n == 0; }

// Starts an asynchronous operation of the running thread.
inline void start(Copy kind, int group, std::function<void()> land) {
  if (block->schedule == Schedule::Eager) return land();
  block->pending.push_back({kind, current, group, std::move(land)});
}

// Carries out this thread's operations of a kind, in order, up to and including a group.
void finish(Thread* issuer, Copy kind, int up_to_group);

}  // namespace emu
