// mbarriers: phases that end when every expected arrival and every expected byte is there.
#pragma once

#include "scheduler.h"

namespace emu {

struct MBarrier {
  std::string name;     // k_full[1]
  int expected = 0;     // arrivals per phase
  int missing = 0;      // arrivals that the open phase still needs
  long bytes = 0;       // bytes that the open phase still needs
  long phase = 0;       // the open phase; its parity is phase & 1
  long loaded = -1;     // the latest phase that a copy fills
  long seen = 0;        // phases that some wait has seen the end of
  uint32_t arrived[kMostWarpgroups] = {};  // time of a warpgroup's last arrival
  Told told, tells;     // by arrivals; by those of phases that have ended

  void arrive();
  void expect(long count) { bytes += count; }
  void complete(long count);
  bool passed(int parity) const { return (phase & 1) != (parity & 1); }
  std::string describe(int parity) const;

 private:
  void end_phase_if_complete();
};

// Gives the barriers of an array their source names; translate.py calls it where they are declared.
void name_mbarriers(const char* name, const void* first, int count);

}  // namespace emu

// The eight bytes in shared memory hold the position of the state in Block::mbarriers.
struct alignas(8) Barrier {
  uint64_t word;

  void init(uint32_t count);
  void wait(int parity, emu::Where where = emu::Where::current());
  bool try_wait(int parity);
  bool test_wait(int parity) { return try_wait(parity); }
  void arrive();
  void expect_transaction(uint32_t bytes) { state("expect_transaction").expect(bytes); }
  void arrive_and_expect_tx(uint32_t bytes) {
    expect_transaction(bytes);
    arrive();
  }
  emu::MBarrier& state(const char* operation);
};

namespace tl {

template <class T>
inline Barrier& as_barrier(T& storage) {
  if constexpr (std::is_pointer_v<T>) return *reinterpret_cast<Barrier*>(storage);
  else return reinterpret_cast<Barrier&>(storage);
}
inline void mbarrier_init(uint64_t& b, uint32_t count) { as_barrier(b).init(count); }
inline void mbarrier_wait(uint64_t& b, int parity, emu::Where where = emu::Where::current()) {
  as_barrier(b).wait(parity, where);
}
inline uint32_t mbarrier_try_wait(uint64_t& b, int parity) {
  return as_barrier(b).try_wait(parity);
}
inline void mbarrier_arrive(uint64_t& b) { as_barrier(b).arrive(); }
inline void mbarrier_expect_tx(uint64_t& b, uint32_t n) { as_barrier(b).expect_transaction(n); }
inline void mbarrier_arrive_expect_tx(uint64_t& b, uint32_t n) {
  as_barrier(b).arrive_and_expect_tx(n);
}

}  // namespace tl
