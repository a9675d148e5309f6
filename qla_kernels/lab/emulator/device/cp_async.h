// cp.async: copies of 4, 8 or 16 bytes that land late, one thread at a time.
#pragma once

#include "mbarrier.h"
#include "shared_memory.h"
#include "tma.h"

namespace emu {

void cp_async(void* shared, const void* global, int bytes, bool copy);  // copy = false: zero-fill
void arrive_after_cp_async(Barrier& barrier);

}  // namespace emu

namespace tl {

template <int bytes>
void cp_async_gs(const void* shared, const void* global) {
  emu::cp_async(const_cast<void*>(shared), global, bytes, true);
}
template <int bytes>
void cp_async_gs_conditional(const void* shared, const void* global, bool condition) {
  emu::cp_async(const_cast<void*>(shared), global, bytes, condition);
}
inline void cp_async_commit() { emu::current->cp_asyncs.commit(); }
template <int in_flight>
void cp_async_wait() {
  emu::Groups& groups = emu::current->cp_asyncs;
  if (in_flight == 0) groups.commit();  // cp.async.wait_all does not need a commit
  emu::wait_for_groups(emu::Copy::CpAsync, groups, in_flight);
}
template <class B>
void mbarrier_cp_async_arrive_noinc(B& barrier) {
  emu::arrive_after_cp_async(as_barrier(barrier));
}

}  // namespace tl
