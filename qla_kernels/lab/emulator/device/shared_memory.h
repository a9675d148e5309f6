// Shared memory of the running block: static arrays, then the dynamic buffer, then a page that
// faults. It starts out as bytes 0xff, which is NaN in every format.
//
// Every 16 bytes have a note of the last write: build.py has g++ call __tsan_* before each load and
// store of a kernel. The time is that of Block::clock, which fences, arrivals and issues move on.
// The guard is the mbarrier that the writer waited for last: in a ring, the slot's `free`. Whoever
// arrives at it gives the slot away.
//
// They also have a note of the last product of each warpgroup that reads them. Who writes to them and
// knows that it was issued must know that it is done: see Known.
//
// Every 4 bytes have a stamp of the last write: who reads them must know of it. Threads of one warp
// are not told apart.
#pragma once

#include "scheduler.h"

namespace emu {

struct Write {
  static constexpr int kBytes = 16;  // no operand of wgmma, and no box, has a part of them
  static constexpr int kCopy = -1;   // by the async proxy: a load of TMA
  uint32_t time = 0;
  int16_t thread = kCopy, guard = -1;
};

struct Stamp {
  static constexpr int kBytes = 4;
  static const Stamp kSeveral;             // parts of the 4 bytes by several writers, in any order
  static constexpr uint32_t kLatest = (1u << 26) - 1;  // or later
  uint32_t writer : 6 = 0, time : 26 = 0;  // none at time 0
  bool operator==(const Stamp&) const = default;
};
inline constexpr Stamp Stamp::kSeveral{1, 0};

struct Reads {
  Products products = {};
};

struct SharedMemory {
  static constexpr uint32_t kStaticCapacity = 16384;  // descriptors reach 256 KB, dynamic has 227
  uint8_t* begin;  // address 0 of the shared window
  uint32_t dynamic_bytes;
  uint32_t static_bytes = 0;  // in use by the running block
  std::vector<Write> writes = {};  // of each 16 bytes, the last
  std::vector<Reads> reads = {};   // of each 16 bytes
  std::vector<Stamp> stamps = {};  // of each 4 bytes
  uint8_t* dynamic() const { return begin + kStaticCapacity; }
  uint8_t* end() const { return dynamic() + dynamic_bytes; }
};

// Of the running block.
struct SharedWindow {
  uint8_t* begin = nullptr;
  size_t bytes = 0;
};
extern thread_local SharedWindow shared_window;

// Who writes: a thread, or a copy that it has issued; with `copy`, of the mbarriers of a number.
struct Writer {
  int thread, guard;
  Known known;
  int copy = -1;
};

[[noreturn]] void report_race(const Writer& writer, size_t piece);

// Whether nothing orders a write before what the running thread does now.
inline bool unordered(const Stamp& stamp) {
  return stamp.time > current->written->until[stamp.writer] &&
         stamp.writer != uint32_t(current->index / kWarp);
}

inline void note_write(const void* shared, size_t bytes, const Writer& writer) {
  auto first = size_t(static_cast<const uint8_t*>(shared) - block->shared->begin);
  size_t last = first + bytes - 1;
  bool copy = writer.copy >= 0;
  auto thread = int16_t(copy ? Write::kCopy : writer.thread), guard = int16_t(writer.guard);
  for (size_t i = first / Write::kBytes; i <= last / Write::kBytes; ++i) {
    if (writer.known.only_issued(block->shared->reads[i].products)) report_race(writer, i);
    block->shared->writes[i] = {block->clock, thread, guard};
  }
  Stamp stamp{uint32_t(copy ? kMostWarps + writer.copy : writer.thread / kWarp),
              std::min(block->clock, Stamp::kLatest)};
  Stamp* stamps = block->shared->stamps.data();
  const Stamp& before = stamps[first / Stamp::kBytes];
  if (bytes < Stamp::kBytes && (before == Stamp::kSeveral || unordered(before)))
    stamp = Stamp::kSeveral;
  std::fill(stamps + first / Stamp::kBytes, stamps + last / Stamp::kBytes + 1, stamp);
}

[[noreturn]] void report_unordered(uint32_t shared);

inline void note_read(const uint8_t* from, size_t bytes) {
  auto first = size_t(from - shared_window.begin);
  for (size_t i = first / Stamp::kBytes; i <= (first + bytes - 1) / Stamp::kBytes; ++i)
    if (unordered(block->shared->stamps[i])) report_unordered(uint32_t(i) * Stamp::kBytes);
}

// Of 16 bytes.
inline bool unordered(uint32_t shared) {
  const Stamp* stamps = &block->shared->stamps[shared / Write::kBytes * 4];
  bool same = !std::memcmp(stamps, stamps + 1, 3 * sizeof(Stamp));  // most often
  return std::any_of(stamps, stamps + (same ? 1 : 4), [](Stamp stamp) { return unordered(stamp); });
}

// Whether a thread wrote the 16 bytes that the async proxy is about to read, and no fence of it, or
// of the running thread, came behind.
inline bool unfenced(uint32_t shared) {
  const Write& write = block->shared->writes[shared / Write::kBytes];
  return write.thread != Write::kCopy && current->fenced <= write.time &&
         block->threads[write.thread].fenced <= write.time;
}

// Whether anyone wrote them since an operation was issued that reads them now.
inline bool overwritten(uint32_t shared, uint32_t issued) {
  return block->shared->writes[shared / Write::kBytes].time >= issued;
}

inline Writer this_thread() { return {current->index, current->guard, current->known}; }

// Whether the 16 bytes are the running thread's warpgroup to read: they were written, and it has not
// given them away since. It may read others, and ignore what it read.
bool owned(uint32_t shared);

std::string about_unordered(uint32_t shared);
std::string about_unfenced(const char* reader, const Where& where, uint32_t shared);
std::string about_overwritten(const char* reader, const Where& where, uint32_t shared);

void* allocate_static_shared(size_t bytes, size_t alignment);

// translate.py turns `extern __shared__ T name[]` into a pointer from here ...
inline void* dynamic_shared() { return block->shared->dynamic(); }

// ... and `__shared__ T name[n]` into a reference from here, one array per declaration and block.
template <class T>
T& static_shared(const void* declaration) {
  void*& array = block->static_shared[declaration];
  if (!array) array = allocate_static_shared(sizeof(T), std::max<size_t>(alignof(T), 16));
  return *static_cast<T*>(array);
}

inline bool is_shared(const void* pointer) {
  auto* byte = static_cast<const uint8_t*>(pointer);
  return byte >= block->shared->begin && byte <= block->shared->end();
}

// The 32-bit shared-memory address that TMA, ldmatrix and wgmma descriptors use, and back.
inline uint32_t shared_address(const void* pointer) {
  if (!is_shared(pointer)) fail("a pointer that is not into shared memory is used as one");
  return uint32_t(static_cast<const uint8_t*>(pointer) - block->shared->begin);
}
inline uint8_t* shared_pointer(uint32_t address) { return block->shared->begin + address; }

// The swizzle of TMA boxes and wgmma tiles: address bits 4, 5, 6 are crossed with bits 7, 8, 9.
inline uint32_t swizzled(uint32_t address, uint32_t span) {
  uint32_t mask = span == 128 ? 0x70 : span == 64 ? 0x30 : span == 32 ? 0x10 : 0;
  return address ^ (address >> 3 & mask);
}

}  // namespace emu

inline size_t __cvta_generic_to_shared(const void* pointer) { return emu::shared_address(pointer); }
inline uint32_t smem_ptr_to_uint(const void* pointer) { return emu::shared_address(pointer); }
inline unsigned cast_smem_ptr_to_int(const void* pointer) { return emu::shared_address(pointer); }
