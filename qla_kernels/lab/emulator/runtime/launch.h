// The launch of one kernel: what main.cpp configures and host.cpp starts.
#pragma once

#include <optional>
#include <string>
#include <vector>
#include <unistd.h>

#include "../device/scheduler.h"
#include "host.h"

namespace emu {

inline const size_t kPage = size_t(sysconf(_SC_PAGESIZE));

struct Kernel {  // one entry of the translated source
  const char* name;
  int parameters;
  void (*call)(const TVMFFIAny* arguments);
  std::vector<std::string> launch_parameters;  // blockIdx.x, ...: what the host passes after them
};
extern const std::vector<Kernel> kernels;

struct Region {  // the memory of one tensor, or of several views of one storage
  std::string names;
  uint8_t* begin;
  size_t bytes;
};

struct Options {
  uint64_t seed = 0;
  double time_limit = 240;
  int workers = 1;
  std::optional<Schedule> schedule;    // for all blocks, instead of by seed
  bool share_named_barriers = false;     // tolerate ids used by several sets of warps
};
extern Options options;
extern std::vector<Region> regions;

void launch(const Kernel& kernel, dim3 grid, dim3 shape, uint32_t dynamic_shared_bytes,
            const TVMFFIAny* arguments);
void run_block(Block& block, const std::function<void()>& body);
std::string report(const Block& block);  // what each group of threads is doing
bool past_time_limit();

// Ends the process with one message, "<kernel, block><who>: <message>"; the first caller wins.
[[noreturn]] void stop(const std::string& message, const std::string& who = "");
std::string culprit();  // ", thread 5": who runs now

// Prints a mistake of a product, once a launch and line. It is one only if the numbers are used: a
// kernel may multiply a slot that is not its own, and ignore the product, where a branch would cost
// more.
void note(const Where& where, const std::string& text);

uint8_t* map_guarded(size_t bytes, size_t alignment, int file = -1, long offset = 0);

}  // namespace emu
