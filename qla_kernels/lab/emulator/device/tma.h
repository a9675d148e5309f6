// TMA: tensor and bulk copies between global and shared memory, late and with bounds.
#pragma once

#include "mbarrier.h"
#include "shared_memory.h"
#include "tensor_map.h"

namespace emu {

struct Box {
  const TensorMap* map;
  int64_t corner[5];
  uint32_t shared;  // address of the box in shared memory
};

// Checks what the hardware requires of a box before the copy is issued.
Box checked_box(const char* operation, const CUtensorMap& descriptor, const void* shared,
                std::initializer_list<int64_t> corner);

void tma_load(const Box& box, Barrier& barrier);
void tma_store(const Box& box);
void tma_store_add(const Box& box);
void bulk_load(void* shared, const void* global, Barrier& barrier, uint32_t bytes);
void bulk_store(void* global, const void* shared, uint32_t bytes);
void bulk_store_add(float* global, const float* shared, uint32_t bytes);

void wait_for_groups(Copy kind, Groups& groups, int in_flight);

}  // namespace emu

namespace tl {

enum class CacheHintSm90 : uint64_t { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST };

#define EMU_CACHE_HINT CacheHintSm90 = CacheHintSm90::EVICT_NORMAL

template <EMU_CACHE_HINT, class B, class... Corner>
void tma_load(const CUtensorMap& descriptor, B& barrier, void* shared, Corner... corner) {
  emu::tma_load(emu::checked_box("tma_load", descriptor, shared, {int64_t(corner)...}),
                as_barrier(barrier));
}
template <EMU_CACHE_HINT, class B>
void tma_load(void* shared, const void* global, B& barrier, uint32_t bytes) {
  emu::bulk_load(shared, global, as_barrier(barrier), bytes);
}
template <EMU_CACHE_HINT, class... Corner>
void tma_store(const CUtensorMap& descriptor, const void* shared, Corner... corner) {
  emu::tma_store(emu::checked_box("tma_store", descriptor, shared, {int64_t(corner)...}));
}
template <EMU_CACHE_HINT>
void tma_store(void* global, const void* shared, uint32_t bytes) {
  emu::bulk_store(global, shared, bytes);
}
template <class... Corner>
void tma_store_add(const CUtensorMap& descriptor, const void* shared, Corner... corner) {
  emu::tma_store_add(emu::checked_box("tma_store_add", descriptor, shared, {int64_t(corner)...}));
}
inline void tma_store_add(float* shared, float* global, uint32_t bytes) {
  emu::bulk_store_add(global, shared, bytes);
}

inline void tma_store_arrive() { emu::current->stores.commit(); }
template <int in_flight, bool read = true>
void tma_store_wait() {
  emu::wait_for_groups(emu::Copy::TmaStore, emu::current->stores, in_flight);
}

inline void prefetch_tma_descriptor(const CUtensorMap&) {}

}  // namespace tl
