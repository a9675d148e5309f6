// Warp collectives: shuffles, votes, __syncwarp, elections.
//
// A collective is a meeting: lanes bring a payload, wait for every lane of the mask, then read each
// other's. Lanes reach it one after the other, so nothing orders a warp's memory accesses but the
// collectives it executes: a missing __syncwarp shows.
#pragma once

#include <array>

#include "scheduler.h"

namespace emu {

using Payload = std::array<uint64_t, 4>;

struct Meeting {
  const char* kind;
  uint32_t mask;
  uint32_t present = 0;
  Known told;
  std::array<Payload, kWarp> payloads;
};

// Returns when all lanes of the mask have come to a meeting of this kind.
std::shared_ptr<const Meeting> meet(const char* kind, uint32_t mask, const Payload& mine,
                                    const Where& where);

inline int lane() { return current->index % kWarp; }

template <class T>
T shuffle(const char* kind, uint32_t mask, T value, int source, Where where) {
  static_assert(sizeof(T) <= 8, "the emulator shuffles at most 8 bytes");
  Payload mine{};
  std::memcpy(&mine[0], &value, sizeof(T));
  auto meeting = meet(kind, mask, mine, where);
  if (!(mask >> (source & 31) & 1)) fail("%s reads lane %d, not in mask %08x", kind, source, mask);
  T result;
  std::memcpy(&result, &meeting->payloads[source & 31][0], sizeof(T));
  return result;
}

// The lane a shuffle reads: shuffles stay within segments of `width` lanes.
inline int lane_at(int target, int width) { return (lane() & -width) | (target & (width - 1)); }
inline int lane_above(int delta, int width) {
  return (lane() & (width - 1)) + delta < width ? lane() + delta : lane();
}
inline int lane_below(int delta, int width) {
  return (lane() & (width - 1)) >= delta ? lane() - delta : lane();
}
inline int lane_across(int bits, int width) {
  int target = lane() ^ bits;
  return target / width <= lane() / width ? target : lane();
}

inline uint32_t ballot(uint32_t mask, bool predicate, Where where) {
  auto meeting = meet("vote", mask, {predicate}, where);
  uint32_t votes = 0;
  for (int i = 0; i < kWarp; ++i)
    if (mask >> i & 1) votes |= uint32_t(meeting->payloads[i][0]) << i;
  return votes;
}

template <class T, class Op>
T reduce(uint32_t mask, T value, Op op, Where where) {
  Payload mine{};
  std::memcpy(&mine[0], &value, sizeof(T));
  auto meeting = meet("__reduce_sync", mask, mine, where);
  T result{};
  bool first = true;
  for (int i = 0; i < kWarp; ++i) {
    if (!(mask >> i & 1)) continue;
    T other;
    std::memcpy(&other, &meeting->payloads[i][0], sizeof(T));
    result = first ? other : op(result, other);
    first = false;
  }
  return result;
}

}  // namespace emu

#define EMU_WHERE emu::Where where = emu::Where::current()

inline void __syncwarp(uint32_t mask = ~0u, EMU_WHERE) {
  emu::meet("__syncwarp", mask, {}, where);
}
template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32, EMU_WHERE) {
  return emu::shuffle("__shfl_sync", mask, value, emu::lane_at(source, width), where);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, int delta, int width = 32, EMU_WHERE) {
  return emu::shuffle("__shfl_up_sync", mask, value, emu::lane_below(delta, width), where);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, int delta, int width = 32, EMU_WHERE) {
  return emu::shuffle("__shfl_down_sync", mask, value, emu::lane_above(delta, width), where);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32, EMU_WHERE) {
  return emu::shuffle("__shfl_xor_sync", mask, value, emu::lane_across(bits, width), where);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate, EMU_WHERE) {
  return emu::ballot(mask, predicate != 0, where);
}
inline int __any_sync(uint32_t mask, int predicate, EMU_WHERE) {
  return emu::ballot(mask, predicate != 0, where) != 0;
}
inline int __all_sync(uint32_t mask, int predicate, EMU_WHERE) {
  return emu::ballot(mask, predicate == 0, where) == 0;
}
template <class T>
T __reduce_add_sync(uint32_t mask, T value, EMU_WHERE) {
  return emu::reduce(mask, value, [](T a, T b) { return T(a + b); }, where);
}
template <class T>
T __reduce_max_sync(uint32_t mask, T value, EMU_WHERE) {
  return emu::reduce(mask, value, [](T a, T b) { return a < b ? b : a; }, where);
}
template <class T>
T __reduce_min_sync(uint32_t mask, T value, EMU_WHERE) {
  return emu::reduce(mask, value, [](T a, T b) { return b < a ? b : a; }, where);
}

namespace tl {

template <class T>
T shfl_sync(uint32_t mask, T value, int source, EMU_WHERE) {
  return __shfl_sync(mask, value, source, 32, where);
}
template <class T>
T shfl_up_sync(uint32_t mask, T value, int delta, EMU_WHERE) {
  return __shfl_up_sync(mask, value, delta, 32, where);
}
template <class T>
T shfl_down_sync(uint32_t mask, T value, int delta, EMU_WHERE) {
  return __shfl_down_sync(mask, value, delta, 32, where);
}
template <class T>
T shfl_xor_sync(uint32_t mask, T value, int bits, EMU_WHERE) {
  return __shfl_xor_sync(mask, value, bits, 32, where);
}

// One thread of every `extent` along x, 0: of all along x. In a block with more dimensions every row
// elects its own, on the device too.
template <int extent>
bool tl_shuffle_elect() {
  if constexpr (extent == 0) return threadIdx.x == 0;
  return threadIdx.x % ((extent + 31) / 32 * 32) == 0;
}

inline int get_lane_idx(int warp = 32) { return emu::current->index % warp; }
inline int get_warp_idx(int warp = 32) { return emu::current->index / warp; }
inline int get_warp_idx_sync(int warp = 32) { return emu::current->index / warp; }
inline int get_warp_group_idx(int warp = 32, int warps = 4) {
  return emu::current->index / (warp * warps);
}

}  // namespace tl
