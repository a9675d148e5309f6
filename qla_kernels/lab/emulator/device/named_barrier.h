// bar.sync and bar.arrive: sixteen ids per block, each counting threads.
#pragma once

#include "scheduler.h"

namespace emu {

struct NamedBarrier {
  struct Use {  // a set of warps that has completed the barrier together
    uint32_t warps;
    int count;
    std::string where;
  };
  int count = 0;    // threads that the open phase needs
  int arrived = 0;
  long phase = 0;
  std::vector<bool> present;  // by thread
  uint32_t warps = 0;
  Told told, tells;   // as of an mbarrier
  std::vector<Use> uses;
};

void named_barrier(int id, int count, bool wait, Where where);

}  // namespace emu

inline void __syncthreads(emu::Where where = emu::Where::current()) {
  emu::named_barrier(0, emu::block->size(), true, where);
}

namespace tl {

inline void __sync_thread_partial(int id = 0, int count = 0,
                                  emu::Where where = emu::Where::current()) {
  emu::named_barrier(id, count ? count : emu::block->size(), true, where);
}
inline void __named_barrier_arrive(int id, int count, emu::Where where = emu::Where::current()) {
  emu::named_barrier(id, count, false, where);
}

}  // namespace tl
