// Fibers and the scheduler: which thread runs next, when copies land, and when nothing can move.
#include "../device/scheduler.h"

#include <cstdarg>
#include <numeric>
#include <sys/mman.h>

#include "../device/mbarrier.h"
#include "../device/named_barrier.h"
#include "../device/shared_memory.h"
#include "../device/warp.h"
#include "../device/wgmma.h"
#include "launch.h"

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu {

thread_local Block* block = nullptr;
thread_local Thread* current = nullptr;
thread_local SharedWindow shared_window;

namespace {

constexpr size_t kStackBytes = 320 * 1024, kStackGuard = 64 * 1024;
constexpr size_t kStackShift = 4096 + 64, kMostShift = 64 * 1024;
constexpr int kNamedBarriers = 16;
thread_local uint8_t* stacks;  // reused by the blocks of this host thread
thread_local jmp_buf scheduler_registers;
thread_local const std::function<void()>* thread_body;

void thread_main() {
  (*thread_body)();
  current->done = true;
  suspend();
}

// So that the stacks' upper ends, which are in use, are not all in the same lines of a cache.
size_t shift_of(int thread) { return thread * kStackShift % kMostShift; }

// A fiber is entered once with setcontext; from then on longjmp switches without system calls.
void resume(Thread& thread) {
  current = &thread;
  unsigned i = thread.index, x = block->shape.x, y = block->shape.y;
  threadIdx = {i % x, i / x % y, i / (x * y)};
  if (_setjmp(scheduler_registers) == 0) {
    if (thread.started) _longjmp(thread.registers, 1);
    thread.started = true;
    setcontext(&thread.entry);
  }
  current = nullptr;
}

// One after the other, each behind memory that faults. To map each alone took most of a small launch.
void map_stacks(size_t count) {
  constexpr size_t each = kStackGuard + kStackBytes;
  stacks = map_guarded(count * each, 16);
  for (size_t i = 0; i < count; ++i)
    if (mprotect(stacks + i * each, kStackGuard, PROT_NONE)) stop("cannot guard a stack");
}

void prepare(Thread& thread) {
  getcontext(&thread.entry);
  thread.entry.uc_stack.ss_sp = stacks + thread.index * (kStackGuard + kStackBytes) + kStackGuard;
  thread.entry.uc_stack.ss_size = kStackBytes - shift_of(thread.index);
  thread.entry.uc_link = nullptr;
  makecontext(&thread.entry, thread_main, 0);
}

bool runnable(const Thread& thread) {
  if (thread.done) return false;
  return !thread.waiting || thread.waiting->ready(thread.waiting->state);
}

void land(size_t position) {
  Pending copy = std::move(block->pending[position]);
  block->pending.erase(block->pending.begin() + position);
  block->landing = &copy;
  copy.land();
  block->landing = nullptr;
}

// Runs every thread that can move; sometimes a warp is slow and misses its turn.
bool run_threads(std::vector<int>& warps) {
  for (size_t i = warps.size(); i > 1; --i) std::swap(warps[i - 1], warps[random_bits() % i]);
  bool moved = false;
  for (int warp : warps) {
    if (moved && one_in(8)) continue;
    int end = std::min(block->size(), (warp + 1) * kWarp);
    for (int i = warp * kWarp; i < end; ++i) {
      if (!runnable(block->threads[i])) continue;
      resume(block->threads[i]);
      moved = true;
    }
  }
  return moved;
}

bool run_tensor_cores() {
  bool busy = false;
  for (WgmmaQueue& queue : block->warpgroups)
    if (queue.busy > 0) {
      --queue.busy;
      busy = true;
    }
  return busy;
}

// Of the products that take as long as they may, finishes those of one warpgroup.
bool finish_latest() {
  std::vector<WgmmaQueue*> late;
  for (WgmmaQueue& queue : block->warpgroups)
    if (queue.busy == WgmmaQueue::kLatest) late.push_back(&queue);
  if (late.empty()) return false;
  late[random_bits() % late.size()]->busy = 0;
  return true;
}

// Mistakes that this run survived, but that no run is promised to.
void check_finished(const Block& block) {
  for (const Thread& thread : block.threads) {
    int i = thread.index;
    if (thread.stores.unwaited())
      fail("thread %d ends without waiting for its TMA store (T.tma_store_wait): the store reads "
           "shared memory that the next block may own", i);
    if (thread.cp_asyncs.unwaited())
      fail("thread %d ends without waiting for its cp.async copies, by group or by mbarrier", i);
    if (thread.wgmmas.unwaited())
      fail("thread %d ends without waiting for its wgmma (T.wait_wgmma)", i);
  }
  for (const MBarrier& barrier : block.mbarriers)
    if (barrier.loaded >= barrier.seen)
      fail("%s: data was loaded in phase %ld, but no thread waited for it: the trip counts of the "
           "two sides differ, or a wait is missing", barrier.name.c_str(), barrier.loaded);
}

std::string place(uint32_t shared) {
  int64_t byte = int64_t(shared) - SharedMemory::kStaticCapacity;
  return byte < 0 ? "a static shared array"
                  : format("byte %ld of dynamic shared memory", long(byte));
}

std::string writer_of(uint32_t shared) {
  const Write& write = block->shared->writes[shared / Write::kBytes];
  return write.thread == Write::kCopy ? "a copy" : format("thread %d", write.thread);
}

std::string ranges(const std::vector<int>& numbers) {
  std::string text;
  for (size_t i = 0, j; i < numbers.size(); i = j + 1) {
    for (j = i; j + 1 < numbers.size() && numbers[j + 1] == numbers[j] + 1;) ++j;
    text += format("%s%d", i ? ", " : "", numbers[i]) + (j > i ? format("..%d", numbers[j]) : "");
  }
  return text;
}

}  // namespace

Block::Block(dim3 index, dim3 grid, dim3 shape, Schedule schedule, uint64_t seed)
    : index(index), grid(grid), shape(shape), schedule(schedule),
      random(seed * 0x9e3779b97f4a7c15 + 0x139408dcbbf7a44),
      threads(size()), meetings((size() + kWarp - 1) / kWarp), written(meetings.size()),
      warpgroups((size() + kWarpgroup - 1) / kWarpgroup), named_barriers(kNamedBarriers) {
  for (int i = 0; i < size(); ++i) {
    threads[i].index = i;
    threads[i].written = &written[i / kWarp];
  }
}
Block::~Block() = default;

void suspend() {
  if (_setjmp(current->registers) == 0) _longjmp(scheduler_registers, 1);
}

void finish(Thread* issuer, Copy kind, int up_to_group) {
  for (size_t i = 0; i < block->pending.size();) {
    const Pending& copy = block->pending[i];
    if (copy.issuer == issuer && copy.kind == kind && copy.group <= up_to_group) land(i);
    else ++i;
  }
}

void run_block(Block& running, const std::function<void()>& body) {
  block = &running;
  thread_body = &body;
  blockIdx = running.index;
  blockDim = running.shape;
  gridDim = running.grid;
  if (!stacks) map_stacks(running.threads.size());
  for (Thread& thread : running.threads) prepare(thread);
  std::vector<int> warps(running.meetings.size());
  std::iota(warps.begin(), warps.end(), 0);

  for (;;) {
    bool moved = run_threads(warps);
    bool busy = run_tensor_cores();
    bool land_now = !moved || (running.schedule != Schedule::Late && one_in(3));
    if (size_t count = running.pending.size(); count && land_now)
      land(one_in(2) ? 0 : random_bits() % count);
    else if (!moved && !busy && !finish_latest())
      break;
    if (past_time_limit())
      stop(format("time limit of %g s, threads still move\n", options.time_limit) +
           report(running));
  }
  for (const Thread& thread : running.threads)
    if (!thread.done) fail("deadlock: no thread can move");
  check_finished(running);
  block = nullptr;
}

std::string report(const Block& block) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;  // by their first thread
  for (const Thread& thread : block.threads) {
    const Waiting* waiting = thread.waiting;
    std::string doing = thread.done                ? "finished"
                        : &thread == current       ? "running: reported this"
                        : waiting                  ? waiting->describe(waiting->state)
                        : thread.started           ? "ready"
                                                   : "not started";
    auto same = [&](const auto& group) { return group.first == doing; };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) group = groups.insert(group, {doing, {}});
    group->second.push_back(thread.index);
  }
  std::string text;
  for (const auto& [doing, threads] : groups)
    text += "  threads " + ranges(threads) + ": " + doing + "\n";
  return text;
}

void fail(const char* text, ...) {
  char message[1024];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(message, sizeof message, text, arguments);
  va_end(arguments);
  stop(std::string(message) + "\n" + (block ? report(*block) : ""), culprit());
}

std::string format(const char* text, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

std::string at(const Where& where) {
  if (!where.line()) return "";
  std::string file = where.file_name();
  return format(" (%s:%u)", file.substr(file.rfind('/') + 1).c_str(), unsigned(where.line()));
}

std::string about_unfenced(const char* reader, const Where& where, uint32_t shared) {
  return format("%s%s reads %s, which thread %d wrote without T.fence_proxy_async behind it: the "
                "async proxy may read what was there before", reader, at(where).c_str(),
                place(shared).c_str(), block->shared->writes[shared / Write::kBytes].thread);
}

std::string about_overwritten(const char* reader, const Where& where, uint32_t shared) {
  return format("%s%s still reads %s, and %s has overwritten it: a slot was released before the "
                "wait, or read before it was full", reader, at(where).c_str(),
                place(shared).c_str(), writer_of(shared).c_str());
}

std::string about_unordered(uint32_t shared) {
  return format("reads %s, and no barrier says that %s has written it: wait at the mbarrier, or at "
                "the named barrier, where the writer arrives behind its write",
                place(shared).c_str(), writer_of(shared).c_str());
}

void report_unordered(uint32_t shared) { fail("%s", about_unordered(shared).c_str()); }

void report_race(const Writer& writer, size_t piece) {
  const Products& reads = block->shared->reads[piece].products;
  const Known& known = writer.known;
  int group = 0;
  while (known.done[group] >= reads[group] || known.issued[group] < reads[group]) ++group;
  const WgmmaQueue& queue = block->warpgroups[group];
  std::string guard =
      writer.guard < 0 ? "it has waited for no mbarrier"
                       : format("the mbarrier that it waited for last, %s, does not say so",
                                block->mbarriers[writer.guard].name.c_str());
  fail("writes to %s, where a wgmma of threads %d..%d%s may still read: %s. Arrive, or release the "
       "slot, behind T.wait_wgmma; wait for the slot before it is written",
       place(uint32_t(piece) * Write::kBytes).c_str(), group * kWarpgroup,
       (group + 1) * kWarpgroup - 1, at(queue.lines[reads[group] - 1]).c_str(),
       guard.c_str());
}

void* allocate_static_shared(size_t bytes, size_t alignment) {
  SharedMemory& shared = *block->shared;
  size_t begin = (shared.static_bytes + alignment - 1) / alignment * alignment;
  if (begin + bytes > SharedMemory::kStaticCapacity)
    fail("static shared arrays need %zu bytes; the emulator has room for %u", begin + bytes,
         SharedMemory::kStaticCapacity);
  shared.static_bytes = uint32_t(begin + bytes);
  return shared.begin + begin;
}

}  // namespace emu

// What g++ calls before a load and a store of a kernel, and in place of an atomic operation. Other
// memory than shared is none of our business.
namespace {

bool is_in_window(const void* from) {
  return size_t(static_cast<const uint8_t*>(from) - emu::shared_window.begin) <
         emu::shared_window.bytes;
}
void reads(const void* from, size_t bytes) {
  if (is_in_window(from)) emu::note_read(static_cast<const uint8_t*>(from), bytes);
}
void writes(const void* to, size_t bytes) {
  if (is_in_window(to)) emu::note_write(to, bytes, emu::this_thread());
}

}  // namespace

extern "C" {
#define EMU_ACCESS(N)                                                          \
  void __tsan_read##N(const void* from) { reads(from, N); }                    \
  void __tsan_write##N(const void* to) { writes(to, N); }
#define EMU_UNALIGNED_ACCESS(N)                                                \
  EMU_ACCESS(N)                                                                \
  void __tsan_unaligned_read##N(const void* from) { reads(from, N); }          \
  void __tsan_unaligned_write##N(const void* to) { writes(to, N); }
EMU_ACCESS(1)
EMU_UNALIGNED_ACCESS(2)
EMU_UNALIGNED_ACCESS(4)
EMU_UNALIGNED_ACCESS(8)
EMU_UNALIGNED_ACCESS(16)
#undef EMU_UNALIGNED_ACCESS
#undef EMU_ACCESS
void __tsan_read_range(const void* from, size_t bytes) { reads(from, bytes); }
void __tsan_write_range(const void* to, size_t bytes) { writes(to, bytes); }
void __tsan_init() {}
#define EMU_ATOMIC(N, T)                                                       \
  T __tsan_atomic##N##_load(const volatile T* from, int) {                     \
    return __atomic_load_n(from, __ATOMIC_SEQ_CST);                            \
  }                                                                            \
  T __tsan_atomic##N##_fetch_add(volatile T* cell, T value, int) {             \
    return __atomic_fetch_add(cell, value, __ATOMIC_SEQ_CST);                  \
  }                                                                            \
  int __tsan_atomic##N##_compare_exchange_weak(volatile T* cell, T* before, T after, int, int) { \
    return __atomic_compare_exchange_n(cell, before, after, true, __ATOMIC_SEQ_CST, \
                                       __ATOMIC_SEQ_CST);                      \
  }
EMU_ATOMIC(16, uint16_t)
EMU_ATOMIC(32, uint32_t)
EMU_ATOMIC(64, uint64_t)
#undef EMU_ATOMIC
}
