// The launch loop: blocks over host threads, guarded memory, the time limit, and crash messages.
#include "launch.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#include "../device/mbarrier.h"
#include "../device/misc.h"
#include "../device/named_barrier.h"
#include "../device/shared_memory.h"
#include "../device/wgmma.h"

namespace emu {

Options options;
std::vector<Region> regions;

namespace {

constexpr uint32_t kMaxDynamicShared = 232448;  // sm_90, per block
constexpr size_t kGuard = 1 << 20;  // bytes that fault before and after a mapping
constexpr size_t kFar = size_t(64) << 30;  // the same of a tensor: its indices come from contents
constexpr double kGrace = 2;  // s between the scheduler's time limit and the watchdog's

const char* running_kernel = "";
double started;  // in CPU seconds
std::atomic<bool> stopping;
std::mutex printing, finishing;
std::condition_variable finished;

struct Worker {  // one host thread
  Block* volatile block = nullptr;
  Thread* volatile* thread = nullptr;  // its `current`
};

size_t pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

std::string block_name(const Block& b) {
  return format("%s, block (%u, %u, %u)", running_kernel, b.index.x, b.index.y, b.index.z);
}

// Says which argument or buffer an address belongs to or just misses.
std::string locate(const uint8_t* address) {
  for (const Region& region : regions) {
    if (!region.bytes) continue;
    int64_t offset = address - region.begin;
    if (offset >= -int64_t(kFar) && offset < 0)
      return format("%ld bytes before %s", long(-offset), region.names.c_str());
    if (offset >= 0 && offset < int64_t(region.bytes + kFar))
      return format("byte %ld of %s, which has %zu bytes", long(offset), region.names.c_str(),
                    region.bytes);
  }
  if (block && block->shared) {
    int64_t offset = address - block->shared->dynamic();
    if (offset >= -int64_t(kGuard) && offset < int64_t(block->shared->dynamic_bytes + kGuard))
      return format("byte %ld of dynamic shared memory, which has %u bytes", long(offset),
                    block->shared->dynamic_bytes);
  }
  if (uint64_t(address) < 4096) return "a null pointer";
  return format("address %p, near no argument (or a fiber's stack overflowed)", address);
}

void on_fault(int signal, siginfo_t* info, void*) {
  std::string what;
  if (signal == SIGFPE) what = "integer division by zero";
  else if (signal == SIGILL) what = "undefined behaviour (a missing return, a division by zero)";
  else what = "memory fault at " + locate(static_cast<uint8_t*>(info->si_addr));
  stop(what, culprit());
}

void handle_faults() {
  static thread_local char stack[65536];
  stack_t alternate{};
  alternate.ss_sp = stack;
  alternate.ss_size = sizeof stack;
  sigaltstack(&alternate, nullptr);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(signal, &action, nullptr);
}

// The process's, of all workers: other processes on the machine do not count.
double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

// A thread that computes for ever never returns to the scheduler, which checks the limit.
void watch(std::vector<Worker>& workers) {
  std::unique_lock lock(finishing);
  while (cpu_seconds() - started < options.time_limit + kGrace)
    if (finished.wait_for(lock, std::chrono::milliseconds(100),
                          [&] { return running_kernel[0] == 0; }))
      return;
  std::string message = format("time limit of %g s\n", options.time_limit);
  for (Worker& worker : workers) {
    Block* stuck = worker.block;
    Thread* thread = worker.thread ? *worker.thread : nullptr;
    if (stuck && thread)
      message += format("  block (%u, %u, %u): thread %d computes and never waits (an endless "
                        "loop, or polling for another block)\n", stuck->index.x, stuck->index.y,
                        stuck->index.z, thread->index);
  }
  stop(message);
}

Schedule schedule_of(uint64_t seed) {
  if (options.schedule) return *options.schedule;
  return seed % 3 == 2 ? Schedule::Late : Schedule::Random;
}

void run_blocks(const Kernel& kernel, dim3 grid, dim3 shape, uint32_t shared_bytes,
                const TVMFFIAny* arguments, std::atomic<uint64_t>& next, Worker& self) {
  handle_faults();
  self.thread = &current;
  uint32_t size = SharedMemory::kStaticCapacity + (shared_bytes + 1023) / 1024 * 1024;
  SharedMemory shared{map_guarded(size, 1024), shared_bytes};
  uint64_t count = uint64_t(grid.x) * grid.y * grid.z;
  for (uint64_t i; (i = next++) < count;) {
    dim3 index{unsigned(i % grid.x), unsigned(i / grid.x % grid.y), unsigned(i / grid.x / grid.y)};
    // NaN, or zeros that look like an index: both find who reads what no thread of the block wrote
    std::memset(shared.begin, options.seed % 2 ? 0 : 0xff, size);
    shared.static_bytes = 0;
    shared.writes.assign(size / Write::kBytes + 1, {});
    shared.reads.assign(size / Write::kBytes + 1, {});
    shared.stamps.assign(size / Stamp::kBytes + 4, {});
    shared_window = {shared.begin, size};
    Block block(index, grid, shape, schedule_of(options.seed + i), options.seed + i);
    block.shared = &shared;
    self.block = &block;
    run_block(block, [&] { kernel.call(arguments); });
    self.block = nullptr;
  }
}

}  // namespace

void launch(const Kernel& kernel, dim3 grid, dim3 shape, uint32_t shared_bytes,
            const TVMFFIAny* arguments) {
  running_kernel = kernel.name;
  started = cpu_seconds();
  uint64_t threads = uint64_t(shape.x) * shape.y * shape.z;
  uint64_t count = uint64_t(grid.x) * grid.y * grid.z;
  if (!count || grid.y > 65535 || grid.z > 65535 || !threads || threads > 1024 ||
      shared_bytes > kMaxDynamicShared)
    stop(format("invalid launch: grid (%u, %u, %u), %lu threads, %u bytes of dynamic shared memory",
                grid.x, grid.y, grid.z, (unsigned long)threads, shared_bytes));

  std::atomic<uint64_t> next{0};
  std::vector<Worker> workers(std::min<uint64_t>(options.workers, count));
  std::thread watchdog(watch, std::ref(workers));
  std::vector<std::thread> pool;
  for (Worker& worker : workers)
    pool.emplace_back([&] {
      run_blocks(kernel, grid, shape, shared_bytes, arguments, next, worker);
    });
  for (std::thread& thread : pool) thread.join();
  {
    std::lock_guard lock(finishing);
    running_kernel = "";
  }
  finished.notify_all();
  watchdog.join();
}

bool past_time_limit() {
  static thread_local unsigned asked = 0;  // the clock is a system call
  return ++asked % 64 == 0 && cpu_seconds() - started > options.time_limit;
}

std::string culprit() {
  if (current) return format(", thread %d", current->index);
  if (block && block->landing) return format(", copy by thread %d", block->landing->issuer->index);
  return "";
}

void stop(const std::string& message, const std::string& who) {
  static thread_local bool mine = false;
  if (mine) _exit(1);  // a fault while reporting
  while (stopping.exchange(true)) pause();  // the first message is the only one
  mine = true;
  std::string where = block ? block_name(*block) : std::string(running_kernel);
  if (!where.empty()) where += who + ": ";
  std::string text = where + message + (message.ends_with('\n') ? "" : "\n");
  fflush(stdout);
  fputs(text.c_str(), stderr);
  _exit(1);
}

void print(const char* message, const std::string& what) {
  std::lock_guard lock(printing);
  printf("block (%u, %u, %u), thread %d: %s %s\n", block->index.x, block->index.y, block->index.z,
         current->index, message, what.c_str());
}

void note(const Where& where, const std::string& text) {
  static std::set<unsigned> lines;
  std::lock_guard lock(printing);
  if (!lines.insert(where.line()).second) return;
  printf("%s: %s\n", block_name(*block).c_str(), text.c_str());
}

// Memory that ends (as far as alignment allows) at a page that faults, and follows one.
uint8_t* map_guarded(size_t bytes, size_t alignment, int file, long offset) {
  size_t body = pages(bytes), guard = file < 0 ? kGuard : kFar;
  auto* base = static_cast<uint8_t*>(mmap(nullptr, body + 2 * guard, PROT_NONE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  int flags = MAP_FIXED | (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED);
  if (base == MAP_FAILED ||
      mmap(base + guard, body, PROT_READ | PROT_WRITE, flags, file, offset) == MAP_FAILED)
    stop(format("cannot map %zu bytes: %s", bytes, strerror(errno)));
  size_t size = (bytes + alignment - 1) / alignment * alignment;
  return base + guard + body - size;
}

}  // namespace emu
